"""SwiGLU's kernels against PyTorch's operators: on a GPU as they are, elsewhere through Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from triton_kernels import DEVICE, assert_replays_to_the_same_bits, gradients, runnable

from tinyllm_ray.model.operations import TORCH

activation = pytest.importorskip("tinyllm_ray.model.kernels.activation")


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    with runnable("activation"):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gates and ups [.., 2 width], spread far enough to reach both ends of the sigmoid."""
    drawn = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(DEVICE, dtype).requires_grad_()


def with_gradient(out: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return out, *gradients((out,), [gate_up])


@pytest.mark.parametrize("width", [1, 5, 24, 320, 896])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_equals_the_operators_in_float64(rows: int, width: int) -> None:
    gate_up = draw(rows, 2 * width)
    found = with_gradient(activation.swiglu(gate_up), gate_up)
    expected = with_gradient(TORCH.swiglu(gate_up), gate_up)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_rounds_as_little_as_its_dtype_allows(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = draw(2, 7, 640, dtype=dtype)
    exact = gate_up.detach().double().requires_grad_()
    found, expected = (with_gradient(way(x), x) for way, x in ((activation.swiglu, gate_up), (TORCH.swiglu, exact)))
    assert {one.dtype for one in found} == {dtype}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:overflow")
def test_gates_far_from_zero_give_numbers() -> None:
    """exp(-gate) overflows where a gate is far below zero."""
    gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], device=DEVICE, requires_grad=True)
    out = activation.swiglu(gate_up)
    assert out.tolist() == [[pytest.approx(one) for one in (0.0, 0.0, 100.0, 1e4)]]
    (gradient,) = torch.autograd.grad(out.sum(), gate_up)
    assert gradient.tolist() == [[pytest.approx(one) for one in (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 100.0, 1e4)]]


def test_keeps_all_but_the_last_dimension() -> None:
    assert activation.swiglu(draw(2, 3, 10)).shape == (2, 3, 5)


def test_gradients_may_come_in_any_layout() -> None:
    gate_up = draw(7, 48)
    given = torch.ones(24, 7, dtype=torch.float64, device=DEVICE).cumsum(1).t()
    found, expected = (torch.autograd.grad(way(gate_up), gate_up, given) for way in (activation.swiglu, TORCH.swiglu))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "columns"), [(896, 128), (1408, 128), (1792, 256), (2560, 512), (3456, 128)])
def test_tiles_of_the_presets_end_with_the_width(width: int, columns: int) -> None:
    assert activation._tile(width) == (2048 // columns, columns)
    assert width % columns == 0


def test_is_registered_as_pytorch_wants_it() -> None:
    torch.library.opcheck(activation._swiglu, (draw(2, 3, 10),))


def test_compiles_into_one_graph() -> None:
    gate_up = draw(2, 3, 10)
    compiled = torch.compile(activation.swiglu, fullgraph=True, backend="aot_eager")
    found, expected = (with_gradient(way(gate_up), gate_up) for way in (compiled, activation.swiglu))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    gate_up = torch.zeros(2**31 // 2048 + 8, 2048, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-1].normal_()
    gate_up.requires_grad_()
    out, expected = activation.swiglu(gate_up), TORCH.swiglu(gate_up[-1:])
    torch.testing.assert_close(out[-1:], expected, rtol=2e-2, atol=1e-2)
    (found,), (own,) = gradients((out[-1:],), [gate_up]), gradients((expected,), [gate_up])
    torch.testing.assert_close(found[-1], own[-1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_graph_replays_it_to_the_same_bits() -> None:
    gate_up = draw(512, 1792, dtype=torch.bfloat16)

    def once() -> tuple[torch.Tensor, ...]:
        out = activation.swiglu(gate_up)
        gradients = torch.autograd.grad(out, gate_up, torch.ones_like(out))
        return out.detach(), *gradients

    assert_replays_to_the_same_bits(once)
