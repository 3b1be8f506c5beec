"""AdamW over flat buffers against PyTorch's own, and what either leaves for the other in a checkpoint."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_kernels import DEVICE, runnable
from torch import nn

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import OptimizerConfig
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.flat_buffers import FlatBuffers
from tinyllm_ray.train.flat_kernel import BLOCK
from tinyllm_ray.train.flat_optimizer import FlatAdamW
from tinyllm_ray.train.optimizer import build_optimizer, set_learning_rate
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]

RATES = (0.01, 0.03, 0.0, 0.002, 0.002)
ODD = {"layers": 1, "width": 10, "heads": 1, "ffn": 7, "vocab_size": 821}
"""No weight is a whole number of blocks, and the embedding has three."""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


class Flat:
    """A model in flat buffers with its optimizer, fed with gradients of the test's."""

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        self.model = initialize(config.model, seed).to(DEVICE, dtype)
        self.buffers = FlatBuffers(self.model, compute or dtype, micro_batches)
        self.optimizer = FlatAdamW(self.buffers, config.optimizer, micro_batches)

    def step(self, parts: list[dict[str, torch.Tensor]], rate: float = 0.01) -> torch.Tensor:
        """One update on the gradients of each micro-batch, by name; loss and norm."""
        self.optimizer.take_up_loaded()
        set_learning_rate(self.optimizer, rate)
        names = zip(self.buffers.weights, self.buffers.twin_weights, strict=True)
        dtypes = {name: weight.dtype for name, weight in names}
        for number, part in enumerate(parts):
            gradients = [part[name].to(dtype) for name, dtype in dtypes.items()]
            self.optimizer.collect(torch.tensor(1.0, device=DEVICE), gradients, first=number == 0)
        said = self.optimizer.settle()
        self.optimizer.step()
        return said


def drawn(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        for name, weight in model.named_parameters()
    }


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


class TestBuffers:
    def test_the_model_keeps_its_names_values_and_shapes(self, tiny: MakeConfig) -> None:
        config = tiny(model=ODD)
        flat, plain = Flat(config), initialize(config.model, 0).to(DEVICE)
        assert list(flat.model.state_dict()) == list(plain.state_dict())
        for name, weight in plain.named_parameters():
            found = flat.model.get_parameter(name)
            assert torch.equal(found, weight)
            assert found.untyped_storage().data_ptr() == flat.buffers.masters.untyped_storage().data_ptr()
            assert found.data_ptr() % 128 == 0

    def test_the_twin_has_matrices_of_its_own_and_the_same_norm_scales(self, tiny: MakeConfig) -> None:
        flat = Flat(tiny(), compute=torch.bfloat16)
        for name, weight in flat.buffers.twin.named_parameters():
            master = flat.model.get_parameter(name)
            if weight.ndim == 1:
                assert weight is master
            else:
                assert weight.dtype == torch.bfloat16
                assert torch.equal(weight, master.bfloat16())
        assert flat.buffers.twin.cos is flat.model.cos

    @pytest.mark.parametrize("tokens", [torch.arange(16).view(2, 8)])
    def test_the_twin_computes_what_autocast_makes_of_the_model(self, tiny: MakeConfig, tokens: torch.Tensor) -> None:
        """But for the embedding's rows, which are bf16: its residual stream is float32 from there on."""
        flat, tokens = Flat(tiny(), compute=torch.bfloat16), tokens.to(DEVICE)
        with torch.no_grad():  # the model's lookup is of the same rows then
            flat.model.embedding.weight.copy_(flat.model.embedding.weight.bfloat16())
        flat.buffers.refresh_if_changed()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert flat.buffers.twin.embedding(tokens).dtype == torch.float32
            assert flat.buffers.twin.hidden(tokens).dtype == flat.model.hidden(tokens).dtype
            assert torch.equal(flat.buffers.twin.loss(tokens, tokens), flat.model.loss(tokens, tokens))

    def test_gradients_of_one_micro_batch_stay_in_the_twins_dtype_and_sums_are_float32(self, tiny: MakeConfig) -> None:
        for micro_batches, dtype in ((1, torch.bfloat16), (2, torch.float32)):
            matrices, scales = Flat(tiny(), compute=torch.bfloat16, micro_batches=micro_batches).buffers.gradients
            assert (matrices.dtype, scales.dtype) == (dtype, torch.float32)

    def test_whoever_writes_to_the_model_is_seen(self, tiny: MakeConfig, tmp_path: Path) -> None:
        flat = Flat(tiny(), compute=torch.bfloat16)
        weight, shadow = flat.model.blocks[1].ffn.down.weight, flat.buffers.twin.blocks[1].ffn.down.weight  # type: ignore[union-attr]
        other = {name: torch.full_like(value, 2.0) for name, value in flat.model.state_dict().items()}
        writes: list[Callable[[], Any]] = [
            lambda: weight.fill_(1.0),
            lambda: weight.detach()[0].fill_(3.0),
            lambda: flat.model.load_state_dict(other),
        ]
        for write in writes:
            with torch.no_grad():
                write()
            assert not torch.equal(shadow, weight.bfloat16())
            flat.optimizer.take_up_loaded()
            assert torch.equal(shadow, weight.bfloat16())

    def test_the_update_itself_costs_no_refreshing(self, tiny: MakeConfig) -> None:
        flat = Flat(tiny())
        flat.step([drawn(flat.model, 0)])
        flat.buffers.shadows.fill_(7.0)
        flat.optimizer.take_up_loaded()
        assert (flat.buffers.shadows == 7.0).all()

    def test_weights_are_written_as_a_plain_models(self, tiny: MakeConfig, tmp_path: Path) -> None:
        config = tiny(model=ODD)
        save_weights(Flat(config).model, tmp_path / "flat")
        save_weights(initialize(config.model, 0), tmp_path / "plain")
        assert (tmp_path / "flat").read_bytes() == (tmp_path / "plain").read_bytes()


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
