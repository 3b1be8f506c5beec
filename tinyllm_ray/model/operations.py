"""The decoder's parts between its matrix products, as an execution chooses them: PyTorch's own or Triton's.

All compute the same; they differ in how often the activations pass through memory. Triton's modules are imported when
an execution asks for one: importing Triton takes a second, and a training is to start quickly.

Shapes: B rows, T tokens a row, M = B T, D width, H heads, F features a head, V vocabulary, N models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.model.autocast import autocast_dtype, matmul_dtype

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Operations:
    """How the parts of a decoder are computed. `TORCH` is the default; equal operations are equal objects."""

    add_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], Pair]
    """(x, delta, scale, eps) to x + delta and its RMSNorm; no delta adds nothing. `scale` is [D], or [N, D] where x
    holds the rows of N models one after the other."""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Triple]
    """(qkv [B, T, 3, H, F], cos, sin [T, F/2]) to query and key, both rotated, and value, each [B, H, T, F]."""
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    """[.., 2 ffn], gate before up, to silu(gate) * up, [.., ffn]."""
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(hidden [M, D], weight [V, D], targets [M]) to the mean cross-entropy of hidden @ weight.T in nats, in float32
    (float64 for a float64 model)."""
    fused_feed_forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None
    """(x [.., D], weights of gate and up [2 ffn, D] and down [D, ffn]) to their products with SwiGLU in one operator;
    None where these shapes or this dtype cannot be."""
    fused_rotation: Callable[..., Triple | None] | None = None
    """(x [B, T, D], weight [3 D, D], cos, sin, H) to what `rotate` makes of their product; None where it cannot be."""
    residual_dtype: torch.dtype = torch.float32
    """Of the residual stream under autocast; without autocast it has the embedding's."""
    recompute_activations: bool = False
    """Whether a block keeps its inputs alone and is computed again in the backward pass."""

    def residual(self, embedded: torch.Tensor) -> torch.Tensor:
        """The embedded tokens as the stream's first state."""
        return embedded if autocast_dtype(embedded) is None else embedded.to(self.residual_dtype)

    def feed_forward(self, x: torch.Tensor, gate_up: nn.Linear, down: nn.Linear) -> torch.Tensor:
        """SwiGLU between two linear maps, or those of N models."""
        if self.fused_feed_forward is not None:
            whole = self.fused_feed_forward(x, gate_up.weight, down.weight)
            if whole is not None:
                return whole
        out: torch.Tensor = down(self.swiglu(gate_up(x)))
        return out

    def project(self, x: torch.Tensor, qkv: nn.Linear, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> Triple:
        """Query and key, rotated, and value, [B, H, T, F], of `x` [B, T, D] by a linear map."""
        if self.fused_rotation is not None:
            whole = self.fused_rotation(x, qkv.weight, cos, sin, heads)
            if whole is not None:
                return whole
        rows, tokens, width = x.shape
        return self.rotate(qkv(x).view(rows, tokens, 3, heads, width // heads), cos, sin)

    def run(self, block: Callable[..., Pair], *inputs: Any) -> Pair:
        """`block(*inputs)`; equal bits whether or not its activations are computed again.

        No random numbers are drawn in a block, so that their generator's state need not be put back, which a CUDA
        graph could not capture.
        """
        if not self.recompute_activations:
            return block(*inputs)
        again: Pair = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return again


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor, eps: float) -> Pair:
    """PyTorch's own; normalised in the scale's dtype, so that a bfloat16 stream has float32 norms."""
    if delta is not None:
        x = x + delta
    width = scale.shape[-1:]
    if scale.ndim == 1:
        return x, functional.rms_norm(x.to(scale.dtype), width, scale, eps)
    normed = functional.rms_norm(x.to(scale.dtype), width, None, eps)
    return x, (normed.view(len(scale), -1, *width) * scale.unsqueeze(1)).view(x.shape)


def rotate_projection(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Triple:
    """PyTorch's own; value is a view of the projection."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, F]
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [B, H, T, F]: feature i is paired with i + F/2, as in Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def projected_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """PyTorch's own: all logits at once."""
    logits = functional.linear(hidden, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, targets)


def fused_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Triton's, on operands in the dtype that autocast would multiply them in."""
    from tinyllm_ray.model.kernels.cross_entropy import linear_cross_entropy

    dtype = matmul_dtype(hidden)
    loss: torch.Tensor = linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets)
    return loss


def fused_feed_forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor | None:
    """Triton's, on operands in the dtype that autocast would multiply them in."""
    from tinyllm_ray.model.kernels import feed_forward as kernel

    dtype = matmul_dtype(x)
    if not kernel.fits(dtype, gate_up, down):
        return None
    return kernel.feed_forward(x.to(dtype), gate_up.to(dtype), down.to(dtype))


def fused_rotation(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> Triple | None:
    """Triton's, on operands in the dtype that autocast would multiply them in."""
    from tinyllm_ray.model.kernels import rotated_projection as kernel

    dtype = matmul_dtype(x)
    if not kernel.fits(dtype, weight, heads):
        return None
    return kernel.rotated_projection(x.to(dtype), weight.to(dtype), cos, sin, heads)


TORCH = Operations(add_norm, rotate_projection, swiglu, projected_loss)
"""PyTorch's own, eager or as its compiler fuses them: what every kernel is held against."""


def _fetches_tiles() -> bool:
    """Whether the GPU, where there is one, moves whole tiles by their descriptors: from compute capability 9.0 on.

    For others Triton computes the place of every element: compiled for 8.0 and 8.9 by its versions 3.6 and 3.9, the
    kernels fill every register that a thread can have, and up to 4 KB more are spilled to memory.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def operations_of(execution: ExecutionConfig) -> Operations:
    """The operations that an execution names. Imports Triton where one of them is Triton's."""
    chosen: dict[str, Any] = {}
    if execution.norm_kernel == "triton":
        from tinyllm_ray.model.kernels.norm import add_norm as norm_kernel

        chosen["add_norm"] = norm_kernel
    if execution.rotary_kernel == "triton":
        from tinyllm_ray.model.kernels.rotary import rotate_projection as rotary_kernel

        chosen |= {"rotate": rotary_kernel, "fused_rotation": fused_rotation if _fetches_tiles() else None}
    if execution.activation_kernel == "triton":
        from tinyllm_ray.model.kernels.activation import swiglu as activation_kernel

        chosen |= {"swiglu": activation_kernel, "fused_feed_forward": fused_feed_forward if _fetches_tiles() else None}
    if execution.loss_kernel == "triton":
        chosen["loss"] = fused_loss
    return replace(
        TORCH,
        **chosen,
        residual_dtype=getattr(torch, execution.residual_dtype),
        recompute_activations=execution.recompute_activations,
    )
