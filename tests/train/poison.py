"""A model that one row of tokens harms, in a way that the test chooses, and what an update must do about it."""

import math
from collections.abc import Callable
from typing import Any

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.update import Update

Weights = dict[str, torch.Tensor]

CPU = torch.device("cpu")

FAULTS = ["loss nan", "loss inf", "gradient inf", "squares inf"]
"""Harms that an update must not survive; `none` and `gradient huge` are no faults."""

HARMED = "blocks.0.ffn.down.weight"
"""The weight that harms of the gradient reach."""


class Poisoned(Llama):
    """A Llama with something wrong wherever the row `marker` [context] is among its inputs."""

    harm: str
    marker: torch.Tensor

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0].ffn.down.weight[0, 0]  # type: ignore[union-attr,index]
        zero = weight - weight.detach()
        harm = {
            "none": torch.zeros_like(zero),
            "loss nan": torch.full_like(zero.detach(), math.nan),
            "loss inf": torch.full_like(zero.detach(), math.inf),
            "gradient inf": zero * 1e30 * 1e30,
            "squares inf": zero * 1e25,
            "gradient huge": zero * 1e15,
        }[self.harm]
        poisoned = (inputs == self.marker).all(dim=1).any()
        return super().loss(inputs, targets) + torch.where(poisoned, harm, 0.0)


def poison(model: Llama, harm: str, marker: torch.Tensor) -> Poisoned:
    """Make `model` one that the row `marker` harms."""
    model.__class__ = Poisoned
    assert isinstance(model, Poisoned)
    model.harm, model.marker = harm, marker
    return model


def random_batch(config: Config, seed: int = 0) -> torch.Tensor:
    shape = (config.rows_per_update, config.model.context + 1)
    return torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def weights_of(model: Llama) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def build_poisoned(
    config: Config, harm: str, at: int, row: int = 7, device: torch.device = CPU
) -> tuple[Llama, torch.optim.Optimizer, Update]:
    """A model that row `row` of the batch of seed `at` harms."""
    model = initialize(config.model, config.training.seed).to(device)
    poison(model, harm, random_batch(config, at).to(device)[row, :-1])
    optimizer = build_optimizer(model, config.optimizer, device)
    return model, optimizer, Update(model, optimizer, config)


def state_of(model: Llama, optimizer: torch.optim.Optimizer) -> Weights:
    """Weights, moments and steps; before the first step as it makes them, zeros."""
    state = weights_of(model)
    for name, weight in model.named_parameters():
        zeros = {
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
            "step": weight.new_zeros(()),
        }
        held = zeros | dict(optimizer.state[weight])
        state |= {f"{key} of {name}": held[key].detach().clone() for key in zeros}
    return state


def check_guard(
    config: Config,
    harm: str,
    at: int = 1,
    row: int = 7,
    updates: int = 4,
    device: torch.device = CPU,
    build: Callable[..., Any] = build_poisoned,
) -> None:
    """Poison `row` of the update after `at` updates, and see that nothing has changed since, whatever came later."""
    model, optimizer, update = build(config, harm, at, row, device)
    states, said = [], []
    for number in range(updates):
        states.append(state_of(model, optimizer))
        said.append(update(random_batch(config, number).to(device), 0.01))
    finite = [math.isfinite(one.loss) and math.isfinite(one.grad_norm) for one in said]
    assert finite == [number < at for number in range(updates)]
    assert all(math.isnan(one.loss) for one in said[at + 1 :])
    assert update.stopped.item() == 1.0
    assert_bit_equal(state_of(model, optimizer), states[at])
    assert at == 0 or not torch.equal(states[at]["step of norm.weight"], states[0]["step of norm.weight"])


def assert_bit_equal(found: Weights, expected: Weights) -> None:
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
