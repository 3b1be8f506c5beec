"""Attention against its formula, on every SDPA backend this CPU has."""

import math

import pytest
import torch

from tinyllm_ray.model.attention import attend, sdpa_backend

CPU_BACKENDS = ("auto", "flash", "math")
GPU_BACKENDS = ("cudnn", "efficient")


def random_heads(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key and value [rows, heads, context, features], leaves of a graph."""
    drawn = torch.randn(3, 2, 3, 10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """softmax(Q K^T / sqrt(F), later keys left out) V, position by position."""
    out = torch.empty_like(query)
    for at in range(query.shape[2]):
        scores = (query[:, :, at : at + 1] * key[:, :, : at + 1]).sum(-1) / math.sqrt(query.shape[3])
        shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
        out[:, :, at] = (shares.unsqueeze(-1) * value[:, :, : at + 1]).sum(2)
    return out


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_equals_the_formula_with_its_gradients(backend: str) -> None:
    found, expected = random_heads(), random_heads()
    upstream = torch.randn(found[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with sdpa_backend(backend):
        out = attend(*found)
        out.backward(upstream)
    reference = formula(*expected)
    reference.backward(upstream)
    torch.testing.assert_close(out, reference, rtol=1e-10, atol=1e-10)
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_backends_agree_in_float32(backend: str) -> None:
    heads = random_heads(torch.float32)
    with sdpa_backend(backend):
        out = attend(*heads)
    torch.testing.assert_close(out.double(), formula(*random_heads()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_backend_without_a_kernel_here_is_refused(backend: str) -> None:
    with sdpa_backend(backend), pytest.raises(RuntimeError, match=r"No (viable backend|available kernel)"):
        attend(*random_heads(torch.float32))


@pytest.mark.parametrize("lengths", [(1, 16), (16, 1), (9, 10)])
def test_lengths_that_differ_are_refused(lengths: tuple[int, int]) -> None:
    """PyTorch would answer, with a mask that lets the last query see the first keys only."""
    query, key = (torch.ones(1, 1, length, 8) for length in lengths)
    with pytest.raises(ValueError, match=f"{lengths[0]} queries over {lengths[1]} keys"):
        attend(query, key, torch.ones_like(key))


def test_the_choice_ends_with_its_context() -> None:
    with sdpa_backend("cudnn"):
        pass
    attend(*random_heads(torch.float32))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError):
        sdpa_backend("fastest")
