"""SwiGLU on the fused projection of gate and up: one Triton kernel forward, one backward.

Bytes moved per element of the activation, in bfloat16: forward 6 (gate and up read, the product written), backward 10
(both and the product's gradient read, both gradients written side by side). 32,768 targets of 20m have 8 x 32,768 x 896
elements: 0.33 ms forward and 0.55 ms backward at 4.3 TB/s.

Inductor makes one kernel each way as well; backward it often computes the product again for the gradient of the
projection that follows, 2 bytes more in time (0.11 ms) for 59 MB less a layer in memory. That is all there is to save.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 2048
"""Elements of a program of four warps: 16 a thread, two loads of 16 bytes from each half."""
_MOST_COLUMNS = 1024


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """As `Operations.swiglu`: [.., 2 ffn] to silu(gate) * up [.., ffn], rounded once, at the end."""
    out: torch.Tensor = _swiglu(gate_up)
    return out


@torch.library.custom_op("tinyllm_ray::swiglu", mutates_args=(), schema="(Tensor gate_up) -> Tensor")
def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    out = _allocate_forward(gate_up)
    _launch(tinyllm_swiglu_forward, gate_up, out, like=out)
    return out


def _allocate_forward(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op(
    "tinyllm_ray::swiglu_backward", mutates_args=(), schema="(Tensor dout, Tensor gate_up) -> Tensor"
)
def _swiglu_backward(dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    dout, gate_up = dout.contiguous(), gate_up.contiguous()
    gradient = _allocate_backward(dout, gate_up)
    _launch(tinyllm_swiglu_backward, dout, gate_up, gradient, like=dout)
    return gradient


def _allocate_backward(dout: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dout):  # type: ignore[no-untyped-def]
    return _swiglu_backward(dout, *ctx.saved_tensors)


_swiglu.register_fake(_allocate_forward)
_swiglu_backward.register_fake(_allocate_backward)
_swiglu.register_autograd(_differentiate, setup_context=_save)


def _launch(kernel: Any, *tensors: torch.Tensor, like: torch.Tensor) -> None:
    """Programs that follow one another have tiles side by side, so that whole rows are read at a time."""
    width = like.shape[-1]
    rows, (tall, columns) = like.numel() // width, _tile(width)
    tiles = -(-width // columns)
    kernel[(-(-rows // tall) * tiles,)](
        *tensors, rows, tiles, WIDTH=width, ROWS=tall, COLUMNS=columns,
        WIDE=tl.float64 if like.dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip


@cache
def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program, powers of two; columns divide the width if 64 or more can (896 = 7 x 128)."""
    columns = min(width & -width, _MOST_COLUMNS)
    if columns < 64:
        columns = min(triton.next_power_of_2(width), 128)
    return _TILE // columns, columns


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    rows, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Where a program's elements are in [rows, WIDTH], and how much further in [rows, 2 WIDTH]; which of them exist."""
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    begin = row[:, None] * WIDTH
    return begin + column[None, :], begin, (row < rows)[:, None] & (column < WIDTH)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_swiglu_forward(  # type: ignore[no-untyped-def]
    gate_up, out, rows, tiles, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    at, begin, inside = _place(rows, tiles, WIDTH, ROWS, COLUMNS)
    gate = tl.load(gate_up + at + begin, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + at + begin + WIDTH, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, gate / (1 + tl.exp(-gate)) * up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_swiglu_backward(  # type: ignore[no-untyped-def]
    dout, gate_up, gradient, rows, tiles,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """With s the gate's sigmoid: dgate = dout up s (1 + gate (1 - s)), dup = dout gate s."""
    at, begin, inside = _place(rows, tiles, WIDTH, ROWS, COLUMNS)
    upstream = tl.load(dout + at, mask=inside, other=0.0).to(WIDE)
    gate = tl.load(gate_up + at + begin, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + at + begin + WIDTH, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-gate))
    tl.store(gradient + at + begin, upstream * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(gradient + at + begin + WIDTH, upstream * gate * sigmoid, mask=inside)
