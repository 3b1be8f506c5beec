"""A model that one row of tokens harms, in a way that the test chooses."""

import math

import torch

from tinyllm_ray.model.llama import Llama

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
