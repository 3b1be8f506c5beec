"""The compiled validation loss on a GPU, between updates that replay CUDA graphs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.evaluate import Evaluator, evaluate
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.update import Update

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.gpu


def test_equals_the_eager_loss_and_leaves_updates_that_replay_graphs_alone(tiny: MakeConfig) -> None:
    config = tiny(
        model={"context": 64, "width": 64, "vocab_size": 2000},
        training={"tokens_per_update": 512},
        execution={"update": "compiled", "compile_mode": "reduce-overhead"},
        evaluation_execution={"micro_batch_size": 32},
    )
    device = torch.device("cuda")
    generator = np.random.default_rng(0)
    shapes = [(32, 65), (32, 65), (20, 65), (1, 40)]
    batches = [generator.integers(0, 2000, shape).astype(np.uint16) for shape in shapes]
    batch = torch.from_numpy(generator.integers(0, 2000, (8, 65))).to(device)

    def train(evaluated: bool) -> list[float]:
        model = initialize(config.model, seed=0).to(device)
        step = Update(model, build_optimizer(model, config.optimizer, device), config)
        evaluator = Evaluator(model, config, device)
        assert evaluator.compiled
        losses = []
        for _ in range(6):
            losses.append(float(step(batch, 0.01).loss))
            if evaluated:
                loss, targets = evaluator.evaluate(batches)
                expected, counted = evaluate(model, batches, "auto")
                assert targets == counted == 84 * 64 + 39
                assert loss == pytest.approx(expected, abs=1e-4)
        return losses

    assert train(evaluated=True) == pytest.approx(train(evaluated=False), rel=1e-3)
