"""Flat buffers: the model that everyone sees, the twin that trains, and how they stay one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_kernels import DEVICE, runnable
from flat_models import ODD, Flat, drawn
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


class Casts(TorchDispatchMode):
    """While entered, notes the shapes of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.shapes.append(arguments[0].shape)
        return function(*arguments, **(keywords or {}))


def gradients_in_bf16(model: Llama, seed: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a micro-batch under autocast."""
    rows = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = model.loss(rows[:, :-1], rows[:, 1:])
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def casts_of_matrices(flat: Flat, model: Any) -> int:
    """How many casts of a matrix, or of its gradient, a forward and backward pass of `model` makes."""
    tokens = torch.arange(45, device=DEVICE).view(3, 15)  # activations have no matrix's shape
    with Casts() as seen:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model.loss(tokens, tokens)
        torch.autograd.grad(loss, list(model.parameters()))
    shapes = {weight.shape for weight in flat.buffers.weights.values() if weight.ndim > 1}
    return sum(shape in shapes or shape[::-1] in shapes for shape in seen.shapes)


class TestBuffers:
    def test_the_model_keeps_its_names_values_and_shapes(self, tiny: MakeConfig) -> None:
        config = tiny(model=ODD)
        flat, plain = Flat(config), initialize(config.model, 0).to(DEVICE)
        assert list(flat.model.state_dict()) == list(plain.state_dict())
        for name, weight in plain.named_parameters():
            found = flat.model.get_parameter(name)
            assert torch.equal(found, weight)
            assert found.untyped_storage().data_ptr() == flat.buffers.masters.untyped_storage().data_ptr()
            assert (found.data_ptr() - flat.buffers.masters.data_ptr()) % 128 == 0  # as the allocator's own are

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

    def test_no_weight_is_cast(self, tiny: MakeConfig) -> None:
        flat = Flat(tiny(), compute=torch.bfloat16)
        assert casts_of_matrices(flat, flat.buffers.twin) == 0
        assert casts_of_matrices(flat, flat.model) > 0

    def test_a_bf16_twin_learns_what_the_model_learns_under_autocast(self, tiny: MakeConfig) -> None:
        config = tiny()
        flat, other = Flat(config, compute=torch.bfloat16), initialize(config.model, 0).to(DEVICE)
        optimizer = build_optimizer(other, config.optimizer, DEVICE)
        set_learning_rate(optimizer, 0.003)
        losses = []
        for update in range(12):
            loss, gradients = gradients_in_bf16(flat.buffers.twin, update % 2)
            names = [name for name, _ in flat.buffers.twin.named_parameters()]
            flat.step([dict(zip(names, gradients, strict=True))], rate=0.003)
            expected, gradients = gradients_in_bf16(other, update % 2)
            for weight, gradient in zip(other.parameters(), gradients, strict=True):
                weight.grad = gradient
            clip_gradients(other.parameters(), config.optimizer.gradient_clip)
            optimizer.step()
            losses.append(loss)
            assert loss == pytest.approx(expected, rel=5e-3), f"update {update}"
        assert losses[-1] < 0.95 * losses[0]
