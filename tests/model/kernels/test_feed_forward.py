"""SwiGLU inside its products against float64: on a GPU as it is, elsewhere through Triton's interpreter.

In float16, since the interpreter multiplies bfloat16 by its bits.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional
from triton_kernels import DEVICE, assert_replays_to_the_same_bits, gradients, runnable

from tinyllm_ray.model.operations import TORCH

kernel = pytest.importorskip("tinyllm_ray.model.kernels.feed_forward")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    with runnable("feed_forward"):
        yield


def draw(rows: int, width: int, ffn: int, dtype: torch.dtype = torch.float16) -> Operands:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (2 * ffn, width), (width, ffn))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    spread = (1.0, 2 * width**-0.5, ffn**-0.5)  # gates reach both sides of the sigmoid
    leaves = [(one * by).to(DEVICE, dtype).requires_grad_() for one, by in zip(drawn, spread, strict=True)]
    return leaves[0], leaves[1], leaves[2]


def exact(operands: Operands) -> Operands:
    return tuple(one.detach().double().requires_grad_() for one in operands)  # type: ignore[return-value]


def apart(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return functional.linear(TORCH.swiglu(functional.linear(x, gate_up)), down)


def with_gradients(out: torch.Tensor, operands: Operands) -> list[torch.Tensor]:
    return [out.detach(), *gradients((out,), list(operands))]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("rows", "width", "ffn"),
    # whole tiles; a rest of rows and of the sum's depth; an activation of one tile, of three, and with a rest of one
    [(128, 64, 128), (1, 8, 64), (131, 72, 64), (7, 200, 192), (33, 24, 200)],
)
def test_equals_the_parts_in_float64(rows: int, width: int, ffn: int) -> None:
    operands = draw(rows, width, ffn)
    expected = exact(operands)
    found = with_gradients(kernel.feed_forward(*operands), operands)
    for one, other in zip(found, with_gradients(apart(*expected), expected), strict=True):
        assert one.dtype == torch.float16
        assert distance(one, other) < 2e-3


def test_one_part_a_program_gives_the_same_bits_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = draw(9, 16, 200)
    expected = with_gradients(kernel.feed_forward(*operands), operands)
    monkeypatch.setattr(kernel, "_BACKWARD_PARTS", 1)
    found = with_gradients(kernel.feed_forward(*operands), operands)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rows_of_a_batch_keep_their_places() -> None:
    x, gate_up, down = draw(6, 16, 64)
    whole = kernel.feed_forward(x, gate_up, down)
    torch.testing.assert_close(kernel.feed_forward(x.view(2, 3, 16), gate_up, down), whole.view(2, 3, 16))


def test_operands_may_lie_in_any_layout() -> None:
    operands = draw(9, 16, 64)
    turned = tuple(one.detach().t().contiguous().t().requires_grad_() for one in operands)
    found = with_gradients(kernel.feed_forward(*turned), turned)  # type: ignore[arg-type]
    torch.testing.assert_close(found, with_gradients(kernel.feed_forward(*operands), operands), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow")
def test_gates_far_from_zero_give_numbers() -> None:
    x = torch.tensor([[-1.0] + [0.0] * 7, [1.0] + [0.0] * 7], device=DEVICE, dtype=torch.float16).requires_grad_()
    gate_up = torch.zeros(128, 8, device=DEVICE, dtype=torch.float16)
    gate_up[:64, 0], gate_up[64:, 0] = 200.0, 1.0
    down = torch.full((8, 64), 1 / 64, device=DEVICE, dtype=torch.float16)
    out = kernel.feed_forward(x, gate_up, down)
    assert out[:, 0].tolist() == [pytest.approx(0.0), pytest.approx(200.0, rel=1e-2)]
    (gradient,) = torch.autograd.grad(out[:, 0].sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "gate_up", "down", "answer"),
    [
        (torch.bfloat16, (128, 8), (8, 64), True),
        (torch.float32, (128, 8), (8, 64), False),
        (torch.bfloat16, (120, 8), (8, 60), False),
        (torch.bfloat16, (128, 12), (12, 64), False),
        (torch.bfloat16, (2, 128, 8), (2, 8, 64), False),
    ],
)
def test_says_what_it_can_compute(
    dtype: torch.dtype, gate_up: tuple[int, ...], down: tuple[int, ...], answer: bool
) -> None:
    assert kernel.fits(dtype, torch.empty(gate_up), torch.empty(down)) is answer


def test_is_registered_as_pytorch_wants_it() -> None:
    torch.library.opcheck(
        kernel._feed_forward, draw(5, 16, 64), rtol=1e-2, atol=1e-2, test_utils=("test_schema", "test_faketensor")
    )


def test_compiles_into_one_graph() -> None:
    operands = draw(5, 16, 64)
    compiled = torch.compile(kernel.feed_forward, fullgraph=True, backend="aot_eager")
    found, expected = (with_gradients(way(*operands), operands) for way in (compiled, kernel.feed_forward))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "ffn"), [(32_768, 320, 896), (4096, 512, 1408), (1000, 640, 1792)])
def test_the_presets_shapes_in_bfloat16_are_as_near_to_float64_as_the_parts(rows: int, width: int, ffn: int) -> None:
    operands = draw(rows, width, ffn, torch.bfloat16)
    leaves = exact(operands)
    expected = with_gradients(apart(*leaves), leaves)
    found, parts = (with_gradients(way(*operands), operands) for way in (kernel.feed_forward, apart))
    for one, part, other in zip(found, parts, expected, strict=True):
        assert distance(one, other) < 1.1 * distance(part, other)


@pytest.mark.gpu
def test_a_graph_replays_it_to_the_same_bits() -> None:
    operands = draw(512, 320, 896, torch.bfloat16)

    def once() -> tuple[torch.Tensor, ...]:
        out = kernel.feed_forward(*operands)
        return out.detach(), *torch.autograd.grad(out, operands, torch.ones_like(out))

    assert_replays_to_the_same_bits(once)
