"""Rotary positions inside the projection against float64: on a GPU as they are, elsewhere through Triton's interpreter.

In float16, since the interpreter multiplies bfloat16 by its bits.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional
from triton_kernels import DEVICE, gradients, runnable

from tinyllm_ray.model.llama import rotary_tables
from tinyllm_ray.model.operations import TORCH

kernel = pytest.importorskip("tinyllm_ray.model.kernels.rotated_projection")

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    with runnable("rotary", "rotated_projection"):
        yield


def draw(
    rows: int, tokens: int, heads: int, features: int, width: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, tokens, width, generator=generator, dtype=torch.float64)
    weight = width**-0.5 * torch.randn(3 * heads * features, width, generator=generator, dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_(), weight.to(DEVICE, dtype).requires_grad_()


def tables(tokens: int, features: int) -> list[torch.Tensor]:
    return [table.to(DEVICE) for table in rotary_tables(tokens, features, 100.0)]


def apart(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> Tensors:
    projected = functional.linear(x, weight)
    return TORCH.rotate(projected.view(*x.shape[:2], 3, heads, -1), cos, sin)


def with_gradients(outputs: Tensors, inputs: list[torch.Tensor]) -> Tensors:
    return *(one.detach() for one in outputs), *gradients(outputs, inputs)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "features", "width"),
    # whole tiles; a last tile that lacks a head, and a rest of rows and of the sum's depth; heads of all sizes
    [(2, 64, 2, 64, 64), (3, 50, 3, 64, 72), (1, 7, 1, 128, 8), (1, 5, 5, 16, 24), (2, 3, 4, 32, 16)],
)
def test_equals_the_parts_in_float64(rows: int, tokens: int, heads: int, features: int, width: int) -> None:
    x, weight = draw(rows, tokens, heads, features, width)
    cos, sin = tables(tokens, features)
    found = with_gradients(kernel.rotated_projection(x, weight, cos, sin, heads), [x, weight])
    leaves = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = with_gradients(apart(*leaves, cos.double(), sin.double(), heads), leaves)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, torch.float16)
        assert distance(one, other) < 2e-3


def test_heads_lie_side_by_side_in_memory_of_their_own() -> None:
    """Attention returns its values in the query's layout, and the output projection reads them without a copy."""
    x, weight = draw(2, 3, 4, 16, 16)
    made = kernel.rotated_projection(x, weight, *tables(3, 16), 4)
    assert {one.stride() for one in made} == {(3 * 4 * 16, 16, 4 * 16, 1)}
    assert len({one.untyped_storage().data_ptr() for one in made}) == 3


@pytest.mark.parametrize(
    ("dtype", "weight", "heads", "answer"),
    [
        (torch.bfloat16, (960, 320), 5, True),
        (torch.float32, (960, 320), 5, False),
        (torch.bfloat16, (36, 12), 2, False),
        (torch.bfloat16, (288, 96), 2, False),
        (torch.bfloat16, (2, 960, 320), 5, False),
    ],
)
def test_says_what_it_can_compute(dtype: torch.dtype, weight: tuple[int, ...], heads: int, answer: bool) -> None:
    assert kernel.fits(dtype, torch.empty(weight), heads) is answer


def test_is_registered_as_pytorch_wants_it() -> None:
    x, weight = draw(1, 5, 2, 16, 16)
    given = (x.flatten(0, 1).detach().requires_grad_(), weight, *tables(5, 16), 5)
    torch.library.opcheck(kernel._project, given, test_utils=("test_schema", "test_faketensor"))


def test_compiles_into_one_graph() -> None:
    x, weight = draw(2, 5, 2, 16, 16)
    cos, sin = tables(5, 16)
    compiled = torch.compile(kernel.rotated_projection, fullgraph=True, backend="aot_eager")
    ways = (compiled, kernel.rotated_projection)
    found, expected = (with_gradients(way(x, weight, cos, sin, 2), [x, weight]) for way in ways)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads", "width"), [(32, 5, 320), (4, 8, 512), (3, 10, 640)])
def test_the_presets_shapes_in_bfloat16_are_as_near_to_float64_as_the_parts(rows: int, heads: int, width: int) -> None:
    x, weight = draw(rows, 1000, heads, 64, width, torch.bfloat16)
    cos, sin = tables(1000, 64)
    leaves = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = with_gradients(apart(*leaves, cos.double(), sin.double(), heads), leaves)
    found, parts = (
        with_gradients(way(x, weight, cos, sin, heads), [x, weight]) for way in (kernel.rotated_projection, apart)
    )
    for one, part, other in zip(found, parts, expected, strict=True):
        assert distance(one, other) < 1.1 * distance(part, other)
