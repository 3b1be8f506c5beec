"""The validation loss of ragged batches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.evaluate import evaluate

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_every_target_counts_the_same_whatever_its_batch(tiny: MakeConfig, backend: str) -> None:
    config = tiny().model
    model = initialize(config, seed=0)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (7, config.context + 1)).astype(np.uint16)
    wide = torch.from_numpy(rows.astype(np.int64))
    expected = model.loss(wide[:, :-1], wide[:, 1:]).item()
    alone = [model.loss(row[None, :-1], row[None, 1:]).item() for row in wide]
    assert np.ptp(alone) > 0.01, "rows differ, so that weights matter"

    loss, targets = evaluate(model, [rows[:4], rows[4:6], rows[6:]], backend)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert targets == 7 * config.context


def test_leaves_no_gradients(tiny: MakeConfig) -> None:
    config = tiny().model
    model = initialize(config, seed=0)
    evaluate(model, [np.zeros((2, config.context + 1), np.uint16)], "auto")
    assert all(weight.grad is None for weight in model.parameters())


def test_the_backend_asked_for_is_the_one_used(tiny: MakeConfig) -> None:
    config = tiny().model
    with pytest.raises(RuntimeError, match=r"No (viable backend|available kernel)"):
        evaluate(initialize(config, seed=0), [np.zeros((2, config.context + 1), np.uint16)], "cudnn")
