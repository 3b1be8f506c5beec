"""Executions that do something else than they were asked to, and short trainings to catch them in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional

from tinyllm_ray.config import Config, validate
from tinyllm_ray.model import llama, operations
from tinyllm_ray.records import TrajectoryPoint
from tinyllm_ray.train import optimizer as optimizer_module
from tinyllm_ray.train import trainer as trainer_module
from tinyllm_ray.train import update as update_module
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.update import Statistics, Update

Lie = Callable[[pytest.MonkeyPatch], None]

CONTEXT, VOCABULARY = 12, 29


def small_config(seed: int = 1, **execution: Any) -> Config:
    """One layer, eight rows an update, 150 updates; gradients that clipping shortens for most of them."""
    return validate(
        {
            "model": {
                "layers": 1,
                "width": 16,
                "heads": 2,
                "ffn": 24,
                "context": CONTEXT,
                "vocab_size": VOCABULARY,
                "init_std": 0.2,
            },
            "optimizer": {"peak_learning_rate": 0.01, "betas": [0.9, 0.95], "gradient_clip": 0.5},
            "training": {
                "tokens_per_update": 8 * CONTEXT,
                "token_budget": 150 * 8 * CONTEXT,
                "epochs": 4,
                "seed": seed,
            },
            "execution": {"micro_batch_size": 4, "cpu_threads": 1, **execution},
        },
        "test",
    )


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Rows [8, context + 1] in which a token follows from the two before it, but for one in eight."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(VOCABULARY, (8, CONTEXT + 1), generator=generator)
        surprises = torch.rand(8, CONTEXT + 1, generator=generator) < 1 / 8
        for at in range(2, CONTEXT + 1):
            ruled = (3 * rows[:, at - 1] + rows[:, at - 2]) % VOCABULARY
            rows[:, at] = torch.where(surprises[:, at], rows[:, at], ruled)
        yield rows


class Run:
    """A training that is stepped by hand."""

    def __init__(self, config: Config) -> None:
        self.model = llama.initialize(config.model, config.training.seed)
        self.optimizer = build_optimizer(self.model, config.optimizer, torch.device("cpu"))
        self._config = config
        self._update = Update(self.model, self.optimizer, config)
        self._batches = batches(config.training.seed)
        self._updates = 0

    def step(self) -> Statistics:
        said = self._update(next(self._batches), learning_rate(self._config, self._updates))
        self._updates += 1
        return said


def trajectory(config: Config, checked: tuple[int, ...]) -> Iterator[TrajectoryPoint]:
    """The points at the `checked` updates, as soon as they are there."""
    run = Run(config)
    for update in range(1, max(checked) + 1):
        said = run.step()
        if update in checked:
            yield TrajectoryPoint(update=update, loss=said.loss.item(), grad_norm=said.grad_norm.item())


@contextmanager
def lying(lie: Lie | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if lie is not None:
            lie(patch)
        yield


def _sees_the_future(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "attend", functional.scaled_dot_product_attention)


def _knows_no_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "rotate", lambda x, cos, sin: x)


def _does_not_clip(patch: pytest.MonkeyPatch) -> None:
    clip = update_module.clip_gradients
    patch.setattr(update_module, "clip_gradients", lambda weights, limit: clip(weights, None))


def _keeps_the_first_rate(patch: pytest.MonkeyPatch) -> None:
    """As a graph does that captured the rate as a number."""
    real, first = optimizer_module.set_learning_rate, []

    def frozen(optimizer: torch.optim.Optimizer, rate: float) -> None:
        first.append(rate)
        real(optimizer, first[0])

    for module in (update_module, trainer_module):  # whichever sets it
        patch.setattr(module, "set_learning_rate", frozen, raising=False)


def _drops_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    real = torch.split
    patch.setattr(torch, "split", lambda batch, size: real(batch, size)[:-1])


def _runs_one_micro_batch_twice(patch: pytest.MonkeyPatch) -> None:
    """In place of the last, so that loss and norm keep their size."""
    real = torch.split
    patch.setattr(torch, "split", lambda batch, size: (*real(batch, size)[:-1], real(batch, size)[0]))


def _replays_a_batch(patch: pytest.MonkeyPatch) -> None:
    """As a graph does whose input nobody fills."""
    name = "run" if hasattr(Update, "run") else "__call__"
    real, first = getattr(Update, name), []

    def call(self: Update, batch: torch.Tensor, *settings: Any) -> Statistics:
        first.append(batch)
        return real(self, first[0], *settings)

    patch.setattr(Update, name, call)


def _loses_accumulated_gradients(patch: pytest.MonkeyPatch) -> None:
    """As a graph does that writes gradients where it should add them."""
    real_init, real_backward, models = Update.__init__, torch.autograd.backward, []

    def init(self: Update, model: llama.Llama, *rest: Any) -> None:
        models.append(model)
        real_init(self, model, *rest)

    def backward(loss: torch.Tensor) -> None:
        models[-1].zero_grad()
        real_backward(loss)

    patch.setattr(Update, "__init__", init)
    patch.setattr(torch.autograd, "backward", backward)


def _never_clears_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


LIES: dict[str, Lie] = {
    "sees the future": _sees_the_future,
    "knows no positions": _knows_no_positions,
    "does not clip": _does_not_clip,
    "keeps the first learning rate": _keeps_the_first_rate,
    "drops the last micro-batch": _drops_the_last_micro_batch,
    "runs one micro-batch twice": _runs_one_micro_batch_twice,
    "replays a batch": _replays_a_batch,
    "loses accumulated gradients": _loses_accumulated_gradients,
    "never clears gradients": _never_clears_gradients,
}
