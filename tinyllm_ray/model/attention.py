"""Causal attention through PyTorch's SDPA, and which of its backends may serve it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal self-attention over [rows, heads, context, head features]; scores are scaled by 1/sqrt(features).

    Raises ValueError where query and key differ in length: PyTorch lines the causal mask up at the first positions,
    so that a single query beside 16 keys would see the first of them alone.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention of {query.shape[2]} queries over {key.shape[2]} keys; the lengths must agree"
        )
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def sdpa_backend(name: str) -> AbstractContextManager[None]:
    """Context in which SDPA runs on the named backend and no other; `auto` leaves the choice to PyTorch.

    It has to surround the call that traces a compiled model: the choice is made while the graph is built.
    PyTorch raises RuntimeError where the backend cannot serve the device, dtype or shape.
    """
    return nullcontext() if name == "auto" else sdpa_kernel(_BACKENDS[name])
