"""The decoder with exchanged operations against the decoder with PyTorch's own."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional
from triton_kernels import DEVICE, runnable

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.operations import TORCH, Operations, operations_of
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.sections import ModelConfig

SHAPE = ModelConfig(layers=2, width=12, heads=2, ffn=10, context=7, vocab_size=31, init_std=0.3)
"""Small, since Triton's interpreter adds number by number; three pairs of features a head, which is no power of two."""
KERNELS: list[dict[str, Any]] = [
    {"norm_kernel": "triton"},
    {"rotary_kernel": "triton"},
    {"activation_kernel": "triton"},
    {"norm_kernel": "triton", "rotary_kernel": "triton", "activation_kernel": "triton"},
]
ALL = KERNELS[-1]


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    pytest.importorskip("triton")
    with runnable("norm_pieces", "norm", "rotary", "activation"):
        yield


def chosen(**execution: Any) -> Operations:
    return operations_of(ExecutionConfig.model_validate(execution))


def build(operations: Operations, dtype: torch.dtype = torch.float64, seed: int = 0) -> Llama:
    """Scales other than one show a misplaced norm."""
    model, generator = initialize(SHAPE, seed, operations), torch.Generator().manual_seed(seed + 1)
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5, generator=generator)
    return model.to(DEVICE, dtype)


def build_packed(operations: Operations) -> PackedLlama:
    packed = initialize_packed(SHAPE, range(2), operations).double().to(DEVICE)
    for worker in range(2):
        packed.load_worker(worker, dict(build(TORCH, seed=worker).named_parameters()))
    return packed


def rows(*shape: int) -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def loss_and_gradients(
    model: Llama | PackedLlama, loss: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    batch = rows(3, 8) if isinstance(model, Llama) else rows(2, 3, 8)
    found = (loss or model.loss)(batch[..., :-1], batch[..., 1:])
    return [found.detach(), *torch.autograd.grad(found.sum(), list(model.parameters()))]


class TestChoice:
    def test_the_default_execution_takes_pytorchs_own(self) -> None:
        assert chosen() == TORCH

    @pytest.mark.parametrize(
        ("execution", "parts"),
        [
            ({"norm_kernel": "triton"}, ["add_norm"]),
            ({"rotary_kernel": "triton"}, ["rotate", "fused_rotation"]),
            ({"activation_kernel": "triton"}, ["swiglu", "fused_feed_forward"]),
            ({"loss_kernel": "triton"}, ["loss"]),
            ({"residual_dtype": "bfloat16"}, ["residual_dtype"]),
            ({"recompute_activations": True}, ["recompute_activations"]),
        ],
    )
    def test_a_setting_changes_its_own_part_alone(self, execution: dict[str, Any], parts: list[str]) -> None:
        operations = chosen(**execution)
        assert all(getattr(operations, part) != getattr(TORCH, part) for part in parts)
        assert replace(operations, **{part: getattr(TORCH, part) for part in parts}) == TORCH
        assert operations == chosen(**execution)

    @pytest.mark.parametrize(
        ("capability", "inside"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
    )
    def test_a_gpu_that_does_not_fetch_tiles_keeps_its_products(
        self, capability: tuple[int, int], inside: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor does Triton refuse it: it takes tiles apart, into more than the registers hold."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        operations = chosen(rotary_kernel="triton", activation_kernel="triton")
        assert (operations.fused_rotation is not None, operations.fused_feed_forward is not None) == (inside, inside)
        assert operations.rotate != TORCH.rotate
        assert operations.swiglu != TORCH.swiglu

    def test_triton_is_imported_only_where_it_is_asked_for(self) -> None:
        code = (
            "import sys\n"
            "import tinyllm_ray.model.packed\n"
            "from tinyllm_ray.execution import ExecutionConfig\n"
            "from tinyllm_ray.model.operations import operations_of\n"
            "operations_of(ExecutionConfig(residual_dtype='bfloat16', loss_kernel='triton'))\n"
            "before = 'triton' in sys.modules\n"
            "operations_of(ExecutionConfig(activation_kernel='triton'))\n"
            "print(before, 'triton' in sys.modules)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
        assert out.split() == ["False", "True"]


@pytest.mark.parametrize("execution", KERNELS, ids=str)
class TestKernels:
    def test_a_model_has_the_losses_and_gradients_of_the_default(self, execution: dict[str, Any]) -> None:
        found, expected = loss_and_gradients(build(chosen(**execution))), loss_and_gradients(build(TORCH))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

    def test_a_pack_has_the_losses_and_gradients_of_the_default(self, execution: dict[str, Any]) -> None:
        found = loss_and_gradients(build_packed(chosen(**execution)))
        expected = loss_and_gradients(build_packed(TORCH))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_all_kernels_agree_in_float32() -> None:
    found, expected = (loss_and_gradients(build(way, torch.float32)) for way in (chosen(**ALL), TORCH))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_with_all_kernels_compiles_whole(recompute: bool) -> None:
    model = build(chosen(**ALL, recompute_activations=recompute))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    found, expected = loss_and_gradients(model, compiled), loss_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("operations", "compiled"),
    [
        ({}, False),
        ({"residual_dtype": "bfloat16"}, False),
        (ALL, False),
        ({**ALL, "residual_dtype": "bfloat16"}, True),
    ],
    ids=str,
)
def test_under_autocast_all_stay_near_float64(operations: dict[str, Any], compiled: bool) -> None:
    model = build(chosen(**operations), torch.float32)
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager") if compiled else model.loss
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = loss_and_gradients(model, loss)
    assert {one.dtype for one in found} == {torch.float32}
    assert distance(found, loss_and_gradients(build(TORCH))) < 0.03


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of the gradients, over their norm; the losses agree to three thousandths."""
    assert found[0].item() == pytest.approx(exact[0].item(), rel=3e-3)
    pairs = list(zip(found[1:], exact[1:], strict=True))
    error = sum(float((one.double() - other).square().sum()) for one, other in pairs)
    return (error / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


class Watched:
    """Operations that note what passes them."""

    def __init__(self, operations: Operations) -> None:
        self.streams: list[torch.dtype] = []
        self._add_norm = operations.add_norm
        self.operations = replace(operations, add_norm=self.add_norm)

    def add_norm(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = self._add_norm(x, *rest)
        self.streams.append(total.dtype)
        return total, normed


class TestRecomputation:
    @pytest.mark.parametrize("execution", [{}, ALL], ids=str)
    def test_gives_equal_bits(self, execution: dict[str, Any]) -> None:
        for builder in (build, build_packed):
            found = loss_and_gradients(builder(chosen(**execution, recompute_activations=True)))
            expected = loss_and_gradients(builder(chosen(**execution)))
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    def test_computes_every_block_twice_and_draws_no_random_numbers(self) -> None:
        watched = Watched(chosen(recompute_activations=True))
        before = torch.get_rng_state()
        loss_and_gradients(build(watched.operations))
        assert len(watched.streams) == 2 * 2 * SHAPE.layers
        assert torch.equal(torch.get_rng_state(), before)

    def test_keeps_a_fraction_of_the_activations(self) -> None:
        def kept(operations: Operations) -> int:
            sizes: list[int] = []

            def note(tensor: torch.Tensor) -> torch.Tensor:
                sizes.append(tensor.nbytes)
                return tensor

            model, batch = build(operations), rows(3, 8)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                model.hidden(batch[:, :-1])
            return sum(sizes)

        assert kept(chosen(recompute_activations=True)) < kept(TORCH) / 5


@pytest.mark.parametrize("builder", [build, build_packed])
def test_the_last_norm_is_left_to_the_compiler(builder: Callable[[Operations], Llama | PackedLlama]) -> None:
    """Or it would write out, before torch 2.13, all that the loss's argument was made from: for minutes."""
    assert builder(chosen(**ALL)).norm.operations is TORCH


class TestResidualDtype:
    @pytest.mark.parametrize("execution", [{}, {"norm_kernel": "triton"}], ids=str)
    @pytest.mark.parametrize("residual", ["float32", "bfloat16"])
    def test_every_sum_has_it_under_autocast(self, execution: dict[str, Any], residual: str) -> None:
        watched = Watched(chosen(**execution, residual_dtype=residual))
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss_and_gradients(build(watched.operations, torch.float32))
        assert set(watched.streams) == {getattr(torch, residual)}
        assert len(watched.streams) == 2 * SHAPE.layers

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_changes_nothing_without_autocast(self, dtype: torch.dtype) -> None:
        found = loss_and_gradients(build(chosen(residual_dtype="bfloat16"), dtype))
        expected = loss_and_gradients(build(TORCH, dtype))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class TestFusedLoss:
    @pytest.fixture
    def given(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
        """A stand-in for the kernel: what it computes, and the dtypes it was called with."""
        seen: list[torch.dtype] = []

        def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.extend([hidden.dtype, weight.dtype])
            assert (hidden.ndim, weight.ndim, targets.ndim) == (2, 2, 1)
            return functional.cross_entropy((hidden @ weight.t()).double(), targets)

        module = ModuleType("tinyllm_ray.model.kernels.cross_entropy")
        module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return seen

    @pytest.mark.parametrize("builder", [build, build_packed])
    def test_is_given_the_states_and_the_embedding(
        self, given: list[torch.dtype], builder: Callable[[Operations], Llama | PackedLlama]
    ) -> None:
        found = loss_and_gradients(builder(chosen(loss_kernel="triton")))
        torch.testing.assert_close(found, loss_and_gradients(builder(TORCH)), rtol=1e-12, atol=1e-12)
        assert set(given) == {torch.float64}

    @pytest.mark.parametrize("norm", ["torch", "triton"])
    def test_is_given_them_in_the_dtype_of_autocast(self, given: list[torch.dtype], norm: str) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found = loss_and_gradients(build(chosen(loss_kernel="triton", norm_kernel=norm), torch.float32))
        assert given == [torch.bfloat16, torch.bfloat16]
        assert {one.dtype for one in found[1:]} == {torch.float32}

    def test_compiles_into_the_models_graph(self, given: list[torch.dtype]) -> None:
        model = build(replace(TORCH, loss=chosen(loss_kernel="triton").loss))
        sys.modules["tinyllm_ray.model.kernels.cross_entropy"].linear_cross_entropy = (  # type: ignore[attr-defined]
            lambda hidden, weight, targets: functional.cross_entropy(hidden @ weight.t(), targets)
        )
        compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
        found, expected = loss_and_gradients(model, compiled), loss_and_gradients(build(TORCH))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class TestSharing:
    def test_a_copy_has_equal_operations(self) -> None:
        model = build(chosen(**ALL))
        assert copy.deepcopy(model).operations == model.operations

    def test_is_the_same_memory_under_other_operations(self) -> None:
        model = build(chosen(recompute_activations=True))
        other = model.sharing(TORCH)
        assert other.operations == TORCH
        assert {block.ffn.operations for block in other.blocks} == {TORCH}
        tokens = rows(2, 7)
        assert torch.equal(other(tokens), model(tokens))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        assert torch.equal(other(tokens), model(tokens))

    def test_is_the_model_itself_under_its_own(self) -> None:
        model = build(TORCH)
        assert model.sharing(chosen()) is model

    def test_models_of_a_pack_have_its_operations_unless_told_otherwise(self) -> None:
        packed = build_packed(chosen(recompute_activations=True))
        assert {worker.operations for worker in packed.workers()} == {packed.operations}
        assert {worker.operations for worker in packed.workers(TORCH)} == {TORCH}
