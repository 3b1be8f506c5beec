"""The rotary kernel against PyTorch's operators: on a GPU as it is, elsewhere through Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from triton_kernels import DEVICE, assert_replays_to_the_same_bits, gradients, runnable

from tinyllm_ray.model.llama import rotary_tables
from tinyllm_ray.model.operations import TORCH, Triple

rotary = pytest.importorskip("tinyllm_ray.model.kernels.rotary")

SHAPES = [(1, 1, 1, 2), (2, 7, 4, 6), (3, 33, 1, 24), (2, 7, 5, 64), (1, 33, 2, 64)]
"""Rows, tokens, heads, features."""


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    with runnable("rotary"):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A projection [B, T, 3, H, F], as the product leaves it."""
    rows, tokens, heads, features = shape
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(rows, tokens, 3, heads, features, generator=generator, dtype=torch.float64)
    return drawn.to(DEVICE, dtype).requires_grad_()


def tables(tokens: int, features: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The beginning of longer tables; theta is small so that every pair turns."""
    return [table.to(DEVICE, dtype)[:tokens] for table in rotary_tables(tokens + 3, features, 10.0)]


def with_gradient(outputs: Triple, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *outputs, *gradients(outputs, [qkv])


@pytest.mark.parametrize("shape", SHAPES)
def test_turns_and_turns_back_as_the_operators_do(shape: tuple[int, ...]) -> None:
    qkv, angles = draw(*shape), tables(shape[1], shape[3])
    found = with_gradient(rotary.rotate_projection(qkv, *angles), qkv)
    expected = with_gradient(TORCH.rotate(qkv, *angles), qkv)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_rounds_as_little_as_its_dtype_allows(dtype: torch.dtype, tolerance: float) -> None:
    qkv, angles = draw(2, 7, 5, 64, dtype=dtype), tables(7, 64, torch.float32)
    exact = qkv.detach().double().requires_grad_()
    found = with_gradient(rotary.rotate_projection(qkv, *angles), qkv)
    expected = with_gradient(TORCH.rotate(exact, *(table.double() for table in angles)), exact)
    assert {one.dtype for one in found} == {dtype}
    torch.testing.assert_close([one.double() for one in found], list(expected), rtol=tolerance, atol=tolerance)


def test_value_keeps_its_bits() -> None:
    qkv = draw(2, 7, 5, 64, dtype=torch.bfloat16)
    value = rotary.rotate_projection(qkv, *tables(7, 64, torch.float32))[2]
    assert torch.equal(value, qkv[:, :, 2].transpose(1, 2))


def test_heads_lie_side_by_side_and_the_projection_can_go() -> None:
    """What attention returns is laid out as its query is, and then needs no rearranging."""
    qkv = draw(2, 7, 5, 64)
    for part in rotary.rotate_projection(qkv, *tables(7, 64)):
        assert part.shape == (2, 5, 7, 64)
        assert part.transpose(1, 2).is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 3, 1), (3, 0, 2)])
def test_gradients_may_come_in_any_layout(order: tuple[int, int, int]) -> None:
    """Each of the three by its own strides."""
    qkv, angles = draw(2, 7, 5, 64), tables(7, 64)
    upstream = torch.randn(2, 10, 14, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    layouts = [
        upstream[:, :5, :7].transpose(1, 2).contiguous().transpose(1, 2),
        upstream[:, ::2, ::2],
        upstream[:, 5:, 7:].transpose(2, 3).contiguous().transpose(2, 3),
        torch.ones((), dtype=torch.float64, device=DEVICE).expand(2, 5, 7, 64),
    ]
    given = [layouts[at] for at in order]
    found, expected = (
        torch.autograd.grad(rotate(qkv, *angles), qkv, given) for rotate in (rotary.rotate_projection, TORCH.rotate)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_output_without_a_gradient_gives_none() -> None:
    qkv, angles = draw(2, 7, 4, 6), tables(7, 6)
    (found,) = torch.autograd.grad(rotary.rotate_projection(qkv, *angles)[0].sum(), qkv)
    (expected,) = torch.autograd.grad(TORCH.rotate(qkv, *angles)[0].sum(), qkv)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_attention_on_its_outputs_returns_their_layout() -> None:
    query, key, value = rotary.rotate_projection(draw(2, 7, 5, 64, dtype=torch.float32), *tables(7, 64, torch.float32))
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert attended.transpose(1, 2).is_contiguous()


def test_is_registered_as_pytorch_wants_it() -> None:
    torch.library.opcheck(rotary._rotate, (draw(2, 3, 2, 6), *tables(3, 6)))


def test_compiles_into_one_graph() -> None:
    qkv, angles = draw(2, 3, 2, 6), tables(3, 6)
    compiled = torch.compile(rotary.rotate_projection, fullgraph=True, backend="aot_eager")
    found = with_gradient(compiled(qkv, *angles), qkv)
    expected = with_gradient(rotary.rotate_projection(qkv, *angles), qkv)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [one.stride() for one in found] == [one.stride() for one in expected]


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    tokens, heads, features = 1024, 16, 64
    rows = 2**31 // (tokens * 3 * heads * features) + 2
    qkv = torch.zeros(rows, tokens, 3, heads, features, dtype=torch.bfloat16, device=DEVICE)
    qkv[-1].normal_()
    qkv.requires_grad_()
    angles = tables(tokens, features, torch.float32)
    found = rotary.rotate_projection(qkv, *angles)
    expected = TORCH.rotate(qkv[-1:], *angles)
    torch.testing.assert_close([one[-1:] for one in found], list(expected), rtol=1e-2, atol=1e-2)
    last = [one[-1:] for one in found]
    found_gradient, expected_gradient = gradients(tuple(last), [qkv])[0], gradients(expected, [qkv])[0]
    torch.testing.assert_close(found_gradient[-1], expected_gradient[-1], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_every_backend_takes_its_outputs_as_they_are(backend: str) -> None:
    """And returns them so that the output projection needs no pass to rearrange them."""
    query, key, value = rotary.rotate_projection(
        draw(2, 128, 5, 64, dtype=torch.bfloat16), *tables(128, 64, torch.float32)
    )
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert attended.transpose(1, 2).is_contiguous()


@pytest.mark.gpu
def test_a_graph_replays_it_to_the_same_bits() -> None:
    qkv, angles = draw(2, 128, 5, 64, dtype=torch.bfloat16), tables(128, 64, torch.float32)
    upstream = [torch.randn(2, 5, 128, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]

    def once() -> tuple[torch.Tensor, ...]:
        outputs = rotary.rotate_projection(qkv, *angles)
        gradients = torch.autograd.grad(outputs, qkv, upstream)
        return *(one.detach() for one in outputs), *gradients

    assert_replays_to_the_same_bits(once)
