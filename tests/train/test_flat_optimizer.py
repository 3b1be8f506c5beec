"""AdamW over flat buffers against PyTorch's own, and what either leaves for the other in a checkpoint."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flat_kernels import DEVICE, runnable
from flat_models import ODD, Flat, drawn
from torch import nn

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import OptimizerConfig
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.flat_kernel import BLOCK
from tinyllm_ray.train.optimizer import build_optimizer, set_learning_rate

MakeConfig = Callable[..., Config]

RATES = (0.01, 0.03, 0.0, 0.002, 0.002)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


def plain_optimizer(model: Llama, config: OptimizerConfig) -> torch.optim.AdamW:
    """PyTorch's plainest AdamW."""
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, foreach=False, fused=False)


def plain_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    parts: list[dict[str, torch.Tensor]],
    rate: float,
    limit: float | None,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(rate, dtype=torch.float32).item()  # rates are kept in float32
    for name, weight in model.named_parameters():
        weight.grad = torch.stack([part[name] for part in parts]).sum(0).to(weight.dtype)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
    optimizer.step()
    return norm.item()


def error(found: nn.Module, expected: nn.Module) -> float:
    """The worst relative error of any weight."""
    others = dict(expected.named_parameters())
    return max(
        ((weight.double() - others[name].double()).norm() / others[name].double().norm()).item()
        for name, weight in found.named_parameters()
    )


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": value.detach().cpu().clone()
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }


class TestEqualsAdamW:
    """Step by step, the norm scales without decay."""

    @pytest.mark.parametrize("micro_batches", [1, 3])
    @pytest.mark.parametrize("limit", [0.5, None])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
    def test_weights_moments_and_norms(
        self, tiny: MakeConfig, dtype: torch.dtype, tolerance: float, limit: float | None, micro_batches: int
    ) -> None:
        # A large eps shows the gradient's scale, which AdamW forgives otherwise.
        config = tiny(model=ODD, optimizer={"gradient_clip": limit, "eps": 0.01, "weight_decay": 0.3})
        flat = Flat(config, dtype, micro_batches=micro_batches)
        other = initialize(config.model, 0).to(DEVICE).double()
        optimizer = plain_optimizer(other, config.optimizer)
        for update, rate in enumerate(RATES):
            parts = [drawn(other, 10 * update + number) for number in range(micro_batches)]
            said = flat.step(parts, rate)
            norm = plain_step(other, optimizer, parts, rate, limit)
            assert said.tolist() == pytest.approx([1.0, norm], rel=tolerance)
            assert error(flat.model, other) < tolerance, f"update {update}"
        expected = moments(other, optimizer)
        for name, found in moments(flat.model, flat.optimizer).items():
            torch.testing.assert_close(found.double(), expected[name].double(), rtol=tolerance, atol=tolerance)

    def test_small_gradients_under_the_usual_eps(self, tiny: MakeConfig) -> None:
        config = tiny(model=ODD, optimizer={"betas": (0.9, 0.999)})
        flat, other = Flat(config, torch.float64), initialize(config.model, 0).to(DEVICE).double()
        optimizer = plain_optimizer(other, config.optimizer)
        for update in range(3):
            small = {name: gradient * 1e-9 for name, gradient in drawn(other, update).items()}
            flat.step([small])
            plain_step(other, optimizer, [small], 0.01, config.optimizer.gradient_clip)
        assert error(flat.model, other) < 1e-12

    def test_padding_stays_zero(self, tiny: MakeConfig) -> None:
        flat = Flat(tiny(model=ODD))
        for update in range(2):
            flat.step([drawn(flat.model, update)])
        for buffer in (flat.buffers.masters, *flat.buffers.moments):
            used = sum(weight.count_nonzero() for weight in flat.buffers.views(buffer))
            assert buffer.count_nonzero() == used
            assert len(buffer) % BLOCK == 0


class Torch:
    """The same with PyTorch's fused AdamW."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config = config
        self.model = initialize(config.model, seed).to(DEVICE)
        self.optimizer = build_optimizer(self.model, config.optimizer, DEVICE)

    def step(self, parts: list[dict[str, torch.Tensor]], rate: float = 0.01) -> None:
        set_learning_rate(self.optimizer, rate)
        for name, weight in self.model.named_parameters():
            weight.grad = parts[0][name].float()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.gradient_clip or math.inf)
        self.optimizer.step()


class TestCheckpoint:
    """Written under one optimizer and gone on from under either."""

    @pytest.mark.parametrize("before", [Flat, Torch])
    @pytest.mark.parametrize("after", [Flat, Torch])
    def test_either_goes_on_from_the_others(
        self, tiny: MakeConfig, tmp_path: Path, before: type[Flat | Torch], after: type[Flat | Torch]
    ) -> None:
        config = tiny(model=ODD)
        first, second = before(config), after(config, seed=5)
        for update in range(3):
            first.step([drawn(first.model, update)])
            second.step([drawn(first.model, 100 + update)])  # what it holds of its own must be gone
        save_checkpoint(tmp_path, 3, first.model, first.optimizer, {}, config, "c" * 64)
        checkpoint = find_checkpoint(tmp_path)
        checkpoint.load_weights(second.model)
        checkpoint.load_training(second.model, second.optimizer)
        found, expected = moments(second.model, second.optimizer), moments(first.model, first.optimizer)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        for update in range(3, 6):
            first.step([drawn(first.model, update)])
            second.step([drawn(first.model, update)])
        assert error(second.model, first.model) <= (0 if before is after else 1e-6)

    def test_a_state_without_moments_begins_them_anew(self, tiny: MakeConfig, tmp_path: Path) -> None:
        config = tiny(model=ODD)
        fresh, used = Torch(config), Flat(config)
        used.step([drawn(used.model, 0)])
        save_checkpoint(tmp_path, 1, fresh.model, fresh.optimizer, {}, config, "c" * 64)
        checkpoint = find_checkpoint(tmp_path)
        checkpoint.load_weights(used.model)
        checkpoint.load_training(used.model, used.optimizer)
        for update in range(2):
            fresh.step([drawn(used.model, update)])
            used.step([drawn(used.model, update)])
        assert error(used.model, fresh.model) < 1e-6

    def test_the_optimizers_own_state_dict_is_taken_in_place(self, tiny: MakeConfig) -> None:
        config = tiny(model=ODD)
        first, second = Flat(config), Flat(config)
        first.step([drawn(first.model, 0)])
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        for flat in (first, second):
            flat.step([drawn(first.model, 1)], rate=0.03)
        assert torch.equal(first.buffers.masters, second.buffers.masters)
        assert [group["lr"].item() for group in second.optimizer.param_groups] == pytest.approx([0.03, 0.03])
