"""The models that a checkpoint holds: a lone one in its root, or every worker of a packed one in its own folder."""

from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tinyllm_ray.model.packed import PackedLlama

WORKERS: Final = "workers"

_WRAPPER = "_orig_mod."
"""What torch.compile's module wrapper puts into its parameters' names."""


class Part(NamedTuple):
    """One of a checkpoint's models; what it gives are views."""

    worker: int | None
    """Its place on a packed model's axis; None where it is alone."""

    @property
    def folder(self) -> str:
        """Where its files lie in the checkpoint's folder: '' or 'workers/03/'."""
        return "" if self.worker is None else f"{WORKERS}/{self.worker:02d}/"

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Its weights under Llama's names."""
        return {name: self._own(weight.detach()) for name, weight in canonical_parameters(model).items()}

    def state(self, optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Any]:
        """What the optimizer holds for it of `weight`: of a lone model the dictionary itself."""
        held = optimizer.state[weight]
        return held if self.worker is None else {key: self._own(value) for key, value in held.items()}

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.worker is None else value[self.worker]


def parts_of(model: nn.Module) -> list[Part]:
    """The models of `model`, whether or not torch.compile wraps it."""
    return parts(count_workers(model))


def parts(workers: int) -> list[Part]:
    """The models of a pack of `workers`; 0 stands for a lone model."""
    return [Part(worker) for worker in range(workers)] or [Part(None)]


def count_workers(model: nn.Module) -> int:
    """How many models are packed in `model`; 0 where it is a lone one."""
    inner = getattr(model, "_orig_mod", model)
    return inner.models if isinstance(inner, PackedLlama) else 0


def canonical_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` under its own names, whether or not it or a part of it is wrapped by torch.compile."""
    return {name.replace(_WRAPPER, ""): weight for name, weight in model.named_parameters()}
