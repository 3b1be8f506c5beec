"""One Triton kernel for one weight of N models: clip, AdamW and mixing in a single pass over memory.

A program has some columns of the weight [N, K] in all N models, which is all that mixing them takes.
"""

import torch
import triton
import triton.language as tl

_SCHEMES = {None: 0, "awc": 1, "atc": 2}


def fused_update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    scales: torch.Tensor,
    scheme: str | None,
    matrix: torch.Tensor | None,
) -> None:
    """Update `weight` and its moments in place, all [N, ...] and contiguous; `scales` [8, N] as the optimizer makes it.

    `matrix` is W [N, N]; scales and matrix have the weight's dtype. Moves 28 bytes a float32 weight.
    """
    for tensor in (weight, gradient, mean, square, scales):
        assert tensor.is_contiguous()
    models = len(weight)
    columns = weight.numel() // models
    padded = triton.next_power_of_2(models)
    block = min(1024, max(32, 8192 // padded**2))  # mixing has N x N x block values in registers
    _update_columns[(triton.cdiv(columns, block),)](
        weight, gradient, mean, square, scales, scales if matrix is None else matrix.contiguous(), columns,
        MODELS=models, PADDED=padded, SCHEME=_SCHEMES[scheme], BLOCK=block,
    )  # fmt: skip


@triton.jit
def _add(one, other):  # type: ignore[no-untyped-def]
    return one + other  # tl.sum would do; the interpreter runs this module's functions alone


@triton.jit
def adamw(x, g, m, v, keep, fresh1, fresh2, size, root, eps):  # type: ignore[no-untyped-def]
    """Weight and moments after a step on the gradient `g`, by `packed_optimizer`'s scales."""
    m += fresh1 * (g - m)
    v += fresh2 * (g * g - v)
    return x * keep - size * (m / (tl.sqrt(v) / root + eps)), m, v


@triton.jit  # type: ignore[untyped-decorator]
def _update_columns(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, scales, matrix, columns,
    MODELS: tl.constexpr, PADDED: tl.constexpr, SCHEME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    model = tl.arange(0, PADDED)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = model[:, None].to(tl.int64) * columns + column[None, :]
    inside = (model < MODELS)[:, None] & (column < columns)[None, :]
    x = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(gradient + at, mask=inside, other=0.0)
    m = tl.load(mean + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if SCHEME != 0:
        pair = model[:, None] * MODELS + model[None, :]
        shares = tl.load(matrix + pair, mask=(model < MODELS)[:, None] & (model < MODELS)[None, :], other=0.0)
    if SCHEME == 1:
        x = tl.reduce(shares[:, :, None] * x[None, :, :], 1, _add)
    real = model < MODELS
    scale = tl.load(scales + model, mask=real, other=0.0)[:, None]
    keep = tl.load(scales + MODELS + model, mask=real, other=0.0)[:, None]
    fresh1 = tl.load(scales + 2 * MODELS + model, mask=real, other=0.0)[:, None]
    fresh2 = tl.load(scales + 3 * MODELS + model, mask=real, other=0.0)[:, None]
    size = tl.load(scales + 4 * MODELS + model, mask=real, other=0.0)[:, None]
    root = tl.load(scales + 5 * MODELS + model, mask=real, other=1.0)[:, None]
    eps = tl.load(scales + 6 * MODELS + model, mask=real, other=1.0)[:, None]
    stopped = tl.load(scales + 7 * MODELS + model, mask=real, other=1.0)[:, None]
    g = tl.where(stopped > 0, 0.0, g * scale)
    x, m, v = adamw(x, g, m, v, keep, fresh1, fresh2, size, root, eps)
    if SCHEME == 2:
        x = tl.reduce(shares[:, :, None] * x[None, :, :], 1, _add)
    tl.debug_barrier()  # every thread has read its weights before any is overwritten
    tl.store(weight + at, x, mask=inside)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
