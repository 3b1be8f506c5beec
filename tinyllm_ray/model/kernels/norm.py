"""RMSNorm of the residual stream and of what is added to it: one Triton kernel forward, one backward.

Bytes moved per element of the stream, for a float32 stream (for a bfloat16 one), additions and gradients in bfloat16:

| kernel | reads | writes | in all |
|---|---|---|---:|
| forward | x 4, delta 2 | sum 4, normed 2 | 12 (8) |
| backward | gradients of normed 2 and sum 4, sum 4 | gradients of x 4 and delta 2 | 16 (8) |

With a bfloat16 stream the gradients of x and delta are one tensor. 32,768 targets of 20m pass 17 norms of width 320,
of which the first adds nothing and the last has no gradient of its sum. Floor at 4.3 TB/s: 0.48 (0.32) ms forward and
0.67 (0.34) ms backward.

Inductor makes the same single kernel forward. Backward it reads gradient and sum a second time for the scale's
gradient, 6 (4) bytes, where it does not fuse the two reductions (`mix_order_reduction`, on by default in torch 2.13):
at most 0.25 (0.17) ms to save.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from tinyllm_ray.model.autocast import matmul_dtype
from tinyllm_ray.model.kernels.norm_pieces import pieces_of, tinyllm_norm_backward_pieces

_TILE = 2048
"""Elements that a program of four warps holds at a time, 16 a thread: 128 registers at most, for four a processor."""
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16
"""Stripes and columns of the scale's gradient that a program adds up at a time: 64 bytes of a row, a sector or two."""
_MOST_STRIPES = 512
"""Programs of a backward pass, all at work at once (132 processors); each sums the scale's gradient over its rows."""


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Operations.add_norm`: x + delta in x's dtype, and its norm in the dtype that matrix products want.

    Computed in float32 (float64 for float64). The scale's gradient is summed in the same order every time.
    """
    total, normed, _ = _add_norm(x, delta, scale, eps, matmul_dtype(x))
    return (x if delta is None else total), normed


@torch.library.custom_op(
    "tinyllm_ray::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? delta, Tensor scale, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
def _add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + delta (empty without delta), its norm in `dtype`, and a row's 1/rms."""
    x, scale = x.contiguous(), scale.contiguous()
    total, normed, inverse = _allocate_forward(x, delta, scale, eps, dtype)
    rows, width, tile = _rows_a_model(x, scale), scale.shape[-1], _tile(scale.shape[-1])
    blocks = -(-rows // tile[0])
    tinyllm_norm_forward[(len(inverse) // rows * blocks,)](
        x, x if delta is None else delta.contiguous(), scale, total, normed, inverse, rows, blocks,
        EPS=eps, WIDTH=width, ROWS=tile[0], PADDED=tile[1], ADDS=delta is not None, WIDE=_wide(x),
        num_warps=_warps(tile),
    )  # fmt: skip
    return total, normed, inverse


def _allocate_forward(
    x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x.new_empty(0 if delta is None else x.shape)
    inverse = x.new_empty(x.numel() // x.shape[-1], dtype=_wide_dtype(x))
    return total, x.new_empty(x.shape, dtype=dtype), inverse


@torch.library.custom_op(
    "tinyllm_ray::add_norm_backward",
    mutates_args=(),
    schema="(Tensor dnormed, Tensor? dtotal, Tensor total, Tensor scale, Tensor inverse, ScalarType? delta_dtype)"
    " -> (Tensor, Tensor, Tensor)",
)
def _add_norm_backward(
    dnormed: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the sum, of delta where its dtype is another (else empty), and of the scale.

    The scale's is summed by each program over its rows and then over programs, in one order always: `Tensor.sum` took
    11.5 us for what moves 0.7 MB, 0.19 ms of an update of 20m on an H200.
    """
    dnormed, total, scale = dnormed.contiguous(), total.contiguous(), scale.contiguous()
    dx, ddelta, _ = _allocate_backward(dnormed, dtotal, total, scale, inverse, delta_dtype)
    rows, width, tile = _rows_a_model(total, scale), scale.shape[-1], _tile(scale.shape[-1])
    models = len(inverse) // rows
    pieces = None if total.dtype == torch.float64 else pieces_of(width)
    step = tile[0] if pieces is None else pieces[1]
    stripes, stripe = _stripes(rows, models, step)
    partial = inverse.new_empty(models, stripes, width)
    operands = (
        dnormed, total if dtotal is None else dtotal.contiguous(), total, scale, inverse, dx, ddelta, partial,
        rows, stripes,
    )  # fmt: skip
    shape = {"STEPS": stripe // step, "WIDTH": width, "ROWS": step}
    options = {"CARRIES": dtotal is not None, "CASTS": ddelta.numel() > 0}
    if pieces is None:
        tinyllm_norm_backward[(models * stripes,)](
            *operands, **shape, **options, PADDED=tile[1], WIDE=_wide(total), num_warps=_warps(tile)
        )
    else:
        tinyllm_norm_backward_pieces[(models * stripes,)](*operands, **shape, **options, PIECE=pieces[0], num_warps=4)
    dscale = torch.empty_like(scale)
    tinyllm_norm_scale_gradient[(models * -(-width // _SUMMED_COLUMNS),)](
        partial, dscale, stripes, WIDTH=width, ROWS=_SUMMED_ROWS, COLUMNS=_SUMMED_COLUMNS, num_warps=4
    )
    return dx, ddelta, dscale


def _allocate_backward(
    dnormed: torch.Tensor,
    dtotal: torch.Tensor | None,
    total: torch.Tensor,
    scale: torch.Tensor,
    inverse: torch.Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ddelta = total.new_empty(0 if delta_dtype in (None, total.dtype) else total.shape, dtype=delta_dtype)
    return total.new_empty(total.shape), ddelta, scale.new_empty(scale.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, delta, scale, _, _ = inputs
    total, _, inverse = output
    ctx.set_materialize_grads(False)  # the last norm's sum has no gradient: zeros would be written and read
    ctx.save_for_backward(x if delta is None else total, scale, inverse)
    ctx.delta_dtype = None if delta is None else delta.dtype


def _differentiate(ctx, dtotal, dnormed, _):  # type: ignore[no-untyped-def]
    total, scale, inverse = ctx.saved_tensors
    if dnormed is None:
        dnormed = torch.zeros_like(total)
    if ctx.delta_dtype is None:
        dtotal = None  # the sum is empty
    dx, ddelta, dscale = _add_norm_backward(dnormed, dtotal, total, scale, inverse, ctx.delta_dtype)
    if ctx.delta_dtype is None:
        ddelta = None
    elif ctx.delta_dtype == total.dtype:
        ddelta = dx
    return dx, ddelta, dscale, None, None


_add_norm.register_fake(_allocate_forward)
_add_norm_backward.register_fake(_allocate_backward)
_add_norm.register_autograd(_differentiate, setup_context=_save)


def _rows_a_model(x: torch.Tensor, scale: torch.Tensor) -> int:
    return x.numel() // scale.numel()


@cache
def _tile(width: int) -> tuple[int, int]:
    """Rows and columns that a program holds at a time, both powers of two."""
    padded = triton.next_power_of_2(width)
    return max(1, min(16, _TILE // padded)), padded


def _warps(tile: tuple[int, int]) -> int:
    return max(4, min(16, tile[0] * tile[1] // 1024))


def _stripes(rows: int, models: int, step: int) -> tuple[int, int]:
    """How many programs share the rows of a model in the backward pass, and how many rows each has, whole steps."""
    steps = -(-rows // step)
    stripe = -(-steps // min(steps, -(-_MOST_STRIPES // models)))
    return -(-steps // stripe), stripe * step


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _add(one, other):  # type: ignore[no-untyped-def]
    return one + other  # tl.sum would do; the interpreter runs this module's functions alone


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_norm_forward(  # type: ignore[no-untyped-def]
    x, delta, scale, total, normed, inverse, rows, blocks,
    EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    ADDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program has ROWS rows of one model; EPS is a constant because an argument would be float32."""
    model = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    real, inside = row < rows, (row < rows)[:, None] & (column < WIDTH)[None, :]
    row = model.to(tl.int64) * rows + row
    at = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADDS:
        value = (value.to(WIDE) + tl.load(delta + at, mask=inside, other=0.0).to(WIDE)).to(value.dtype)
        tl.store(total + at, value, mask=inside)
    value = value.to(WIDE)  # as it was stored, which is what the backward pass sees
    rms = tl.sqrt(tl.reduce(value * value, 1, _add) / WIDTH + EPS)
    tl.store(inverse + row, 1 / rms, mask=real)
    factor = tl.load(scale + model * WIDTH + column, mask=column < WIDTH, other=0.0).to(WIDE)
    tl.store(normed + at, value * (1 / rms)[:, None] * factor[None, :], mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_norm_backward(  # type: ignore[no-untyped-def]
    dnormed, dtotal, total, scale, inverse, dx, ddelta, partial, rows, stripes,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    CARRIES: tl.constexpr, CASTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program has STEPS times ROWS rows of one model, and one row of `partial`.

    With u = x/rms and g = scale * dnormed: dx = (g - u mean(g u))/rms + dtotal, dscale = sum over rows of dnormed * u.
    """
    model = tl.program_id(0) // stripes
    first = tl.program_id(0) % stripes * (STEPS * ROWS)
    column = tl.arange(0, PADDED)
    factor = tl.load(scale + model * WIDTH + column, mask=column < WIDTH, other=0.0).to(WIDE)
    sums = tl.full((ROWS, PADDED), 0.0, WIDE)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        real, inside = row < rows, (row < rows)[:, None] & (column < WIDTH)[None, :]
        row = model.to(tl.int64) * rows + row
        at = row[:, None] * WIDTH + column[None, :]
        upstream = tl.load(dnormed + at, mask=inside, other=0.0).to(WIDE)
        value = tl.load(total + at, mask=inside, other=0.0).to(WIDE)
        if CARRIES:  # asked for here, as no load passes the barrier of the sum over a row
            carried = tl.load(dtotal + at, mask=inside, other=0.0)
        per_rms = tl.load(inverse + row, mask=real, other=0.0)[:, None]
        unit = value * per_rms
        sums += upstream * unit
        gradient = upstream * factor[None, :]
        gradient = (gradient - unit * (tl.reduce(gradient * unit, 1, _add) / WIDTH)[:, None]) * per_rms
        if CARRIES:
            gradient += carried.to(WIDE)
        tl.store(dx + at, gradient, mask=inside)
        if CASTS:
            tl.store(ddelta + at, gradient, mask=inside)
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    tl.store(partial + place, tl.reduce(sums, 0, _add), mask=column < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_norm_scale_gradient(  # type: ignore[no-untyped-def]
    partial, dscale, stripes, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program sums COLUMNS columns of one model's `partial` [stripes, WIDTH]."""
    groups: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    model = tl.program_id(0) // groups
    column = tl.program_id(0) % groups * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.full((ROWS, COLUMNS), 0.0, partial.dtype.element_ty)
    for first in range(0, stripes, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < stripes)[:, None] & (column < WIDTH)[None, :]
        at = (model.to(tl.int64) * stripes + row)[:, None] * WIDTH + column[None, :]
        sums += tl.load(partial + at, mask=inside, other=0.0)
    total = tl.reduce(sums, 0, _add)
    tl.store(dscale + model * WIDTH + column, total, mask=column < WIDTH)
