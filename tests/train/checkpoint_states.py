"""Models in training for the tests of checkpoints, and what is compared of them."""

from pathlib import Path
from typing import Any

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.train.optimizer import build_optimizer, set_learning_rate
from tinyllm_ray.train.packed_optimizer import PackedAdamW, build_packed_optimizer

CACHE = "c" * 64


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


class Training:
    """A model and its optimizer after some updates whose gradients depend on `seed` and the update."""

    def __init__(self, config: Config, updates: int = 3, seed: int = 1, device: str = "cpu") -> None:
        self.config = config
        self.updates = 0
        self.build(seed, device)
        for _ in range(updates):
            self.update(seed)

    def build(self, seed: int, device: str) -> None:
        self.model: Llama | PackedLlama = initialize(self.config.model, seed).to(device)
        self.optimizer: torch.optim.Optimizer = build_optimizer(self.model, self.config.optimizer, torch.device(device))

    def update(self, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + self.updates)
        set_learning_rate(self.optimizer, 0.01)
        for weight in self.model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.device)
        self.optimizer.step()
        self.updates += 1

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self.model.named_parameters()}

    def moments(self) -> dict[str, Any]:
        return {
            f"{name} {key}": value.detach().cpu().clone()
            for name, weight in self.model.named_parameters()
            for key, value in self.optimizer.state.get(weight, {}).items()
        }


class PackedTraining(Training):
    """Models side by side, of which the second stops after its first update."""

    def __init__(
        self, config: Config, updates: int = 3, seed: int = 1, device: str = "cpu", *, models: int = 3
    ) -> None:
        self.models = models
        super().__init__(config, updates, seed, device)

    def build(self, seed: int, device: str) -> None:
        self.model = initialize_packed(self.config.model, range(seed, seed + self.models)).to(device)
        self.optimizer = build_packed_optimizer(self.model.parameters(), self.config.optimizer)

    def update(self, seed: int = 1) -> None:
        super().update(seed)
        assert isinstance(self.optimizer, PackedAdamW)
        self.optimizer.stop(torch.arange(self.models, device=self.optimizer.stopped.device) == 1)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
