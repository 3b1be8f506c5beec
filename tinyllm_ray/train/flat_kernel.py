"""Triton kernels of AdamW over flat buffers: collect the gradients, settle an update's figures, update every weight.

A flat buffer is a row of blocks of `BLOCK` elements, one program's share in every kernel. Each weight begins with a
block and is padded to whole ones with zeros, which stay zeros; matrices come first, then norm scales. So no block has
two weights, and whether it decays goes by its number. The presets' matrices are whole blocks as they are, and padding
their scales takes 0.3% (20m).

Bytes a weight that take bf16 gradients of the backward pass to one flat gradient and its norm, time at 4.3 TB/s, and
kernels, of 20m's 20.4 M weights in 33 matrices and 17 scales:

| how | 1 micro-batch | 8 micro-batches |
| --- | --- | --- |
| autograd adds to float32 views: cast 6, zero 4, add 12, norm 4 | 26 B, 0.12 ms, 85 | 152 B, 0.72 ms, 666 |
| `torch.cat` 4, then an add 10, of the first 6, norm 2 or 4 | 6 B, 0.03 ms, 4 | 112 B, 0.53 ms, 34 |
| `collect`: copy 4, or 6 into float32 and then add 10, squares on the way | 4 B, 0.02 ms, 1 | 76 B, 0.36 ms, 8 |

Nothing is added atomically: equal gradients give equal bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tinyllm_ray.train.packed_kernel import adamw

BLOCK = 4096
"""Elements of one program, 16 a thread: each thread has four loads of 16 bytes a buffer in flight."""

_WARPS = 8


class Places(NamedTuple):
    """Where tensors lie in a row of blocks, one entry each."""

    first: tuple[int, ...]
    """Its first block."""
    length: tuple[int, ...]
    """Its elements."""
    blocks: int
    """Of all together."""


def place(lengths: Sequence[int]) -> Places:
    """Tensors one after another, each beginning with a block."""
    first, blocks = [], 0
    for length in lengths:
        first.append(blocks)
        blocks += triton.cdiv(length, BLOCK)
    return Places(tuple(first), tuple(lengths), blocks)


def collect(
    gradients: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    places: tuple[Places, Places],
    sums: tuple[torch.Tensor, torch.Tensor],
    partials: torch.Tensor,
    loss: torch.Tensor,
    total: torch.Tensor,
    *,
    add: bool,
) -> None:
    """Put a micro-batch's gradients into the flat `sums`, or add them to those; pairs are (matrices, norm scales).

    Also puts the sum of squares of each block of the outcome into `partials`, float64 [blocks], and the scalar `loss`
    into `total`, a float64 scalar, or adds it. Gradients are contiguous, and within a pair's half of one dtype; what is
    added is added in float32, or float64 where `sums` has it.
    """
    matrices, scales = ([one.contiguous() for one in half] for half in gradients)
    of_matrices, of_scales = places
    tinyllm_flat_collect[(of_matrices.blocks + of_scales.blocks,)](
        tuple(matrices), tuple(scales), *sums, partials, loss, total, int(add),
        MATRIX_FIRST=of_matrices.first, MATRIX_LENGTH=of_matrices.length, MATRIX_BLOCKS=of_matrices.blocks,
        SCALE_FIRST=of_scales.first, SCALE_LENGTH=of_scales.length, BLOCK=BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def settle(
    partials: torch.Tensor,
    total: torch.Tensor,
    settings: torch.Tensor,
    rate: torch.Tensor,
    steps: torch.Tensor,
    stopped: torch.Tensor,
    figures: torch.Tensor,
    said: torch.Tensor,
) -> None:
    """Everything about an update that is one number: loss, norm, whether it is at fault, what it multiplies by.

    `settings` is float64 [6]: both betas, eps, decay, the norm's limit (inf for none), micro-batches. `rate`, `steps`
    and `stopped` are float32 scalars; `steps` counts this update and `stopped` becomes 1 for good where loss or norm
    is not finite. `figures`, float64 [8], becomes what `packed_optimizer` makes of the same for N models: gradient,
    weight, fresh share of either moment, step, root, eps, stopped. `said` [2] becomes the mean loss, which is nan where
    an earlier update was at fault, and the norm.
    """
    blocks = len(partials)
    width = min(4096, triton.next_power_of_2(blocks))
    tinyllm_flat_settle[(1,)](
        partials, total, settings, rate, steps, stopped, figures, said, blocks, WIDTH=width, num_warps=_WARPS
    )  # fmt: skip


def update(
    masters: torch.Tensor,
    means: torch.Tensor,
    squares: torch.Tensor,
    shadows: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    figures: torch.Tensor,
) -> None:
    """One step of AdamW on all of a flat model, in place, and the matrices' new `shadows` in a dtype of their own.

    Moves 24 bytes a float32 weight, and of a matrix 2 for its bf16 shadow and 2 or 4 for its gradient: 20m 0.14 ms at
    4.3 TB/s.
    """
    matrix_blocks = len(shadows) // BLOCK
    tinyllm_flat_update[(len(masters) // BLOCK,)](
        masters, means, squares, shadows, *sums, figures, matrix_blocks, BLOCK=BLOCK, num_warps=_WARPS
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    sources, sums, partials, add, block,
    FIRST: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block `block` of a row of tensors."""
    source, first, length = sources[0], FIRST[0], LENGTH[0]
    for number in tl.static_range(1, len(FIRST)):
        reached = block >= FIRST[number]
        source = tl.where(reached, sources[number], source)
        first = tl.where(reached, FIRST[number], first)
        length = tl.where(reached, LENGTH[number], length)
    at = tl.arange(0, BLOCK)
    inside = (block - first) * BLOCK + at
    place = block.to(tl.int64) * BLOCK + at
    wide = tl.float64 if sums.dtype.element_ty == tl.float64 else tl.float32
    gradient = tl.load(source + inside, mask=inside < length, other=0.0).to(wide)
    gradient += tl.load(sums + place, mask=tl.full((BLOCK,), add, tl.int32) > 0, other=0.0).to(wide)
    tl.store(sums + place, gradient.to(sums.dtype.element_ty))
    # Squared before it is widened: a square that float32 cannot hold shows as inf, and is no update to make.
    tl.store(partials + block, tl.sum((gradient * gradient).to(tl.float64), 0))


@triton.jit(do_not_specialize=["add", "loss"])  # type: ignore[untyped-decorator]
def tinyllm_flat_collect(  # type: ignore[no-untyped-def]
    matrices, scales, matrix_sums, scale_sums, partials, loss, total, add,
    MATRIX_FIRST: tl.constexpr, MATRIX_LENGTH: tl.constexpr, MATRIX_BLOCKS: tl.constexpr,
    SCALE_FIRST: tl.constexpr, SCALE_LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < MATRIX_BLOCKS:
        _gather(matrices, matrix_sums, partials, add, block, MATRIX_FIRST, MATRIX_LENGTH, BLOCK)
    else:
        _gather(
            scales, scale_sums, partials + MATRIX_BLOCKS, add, block - MATRIX_BLOCKS, SCALE_FIRST, SCALE_LENGTH, BLOCK
        )
    if block == 0:
        tl.store(total, tl.load(total, mask=add > 0, other=0.0) + tl.load(loss).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_flat_settle(  # type: ignore[no-untyped-def]
    partials, total, settings, rate, steps, stopped, figures, said, blocks, WIDTH: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, WIDTH)
    sums = tl.full((WIDTH,), 0.0, tl.float64)
    for begin in range(0, blocks, WIDTH):
        sums += tl.load(partials + begin + at, mask=begin + at < blocks, other=0.0)
    norm = tl.sqrt(tl.sum(sums, 0))
    beta1, beta2, eps = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    decay, limit, accumulation = tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5)
    loss = tl.load(total) / accumulation
    before = tl.load(stopped) > 0
    infinity = float("inf")
    fault = before | ~(tl.abs(loss) < infinity) | ~(tl.abs(norm) < infinity)
    made = tl.load(steps) + tl.where(fault, 0.0, 1.0)
    tl.store(steps, made)
    tl.store(stopped, tl.where(fault, 1.0, 0.0))
    tl.store(said, tl.where(before, float("nan"), loss).to(said.dtype.element_ty))
    tl.store(said + 1, norm.to(said.dtype.element_ty))
    count = tl.maximum(made, 1.0).to(tl.float64)
    size = tl.load(rate).to(tl.float64)
    # In float64: 1 - 0.999 has no four digits in float32.
    tl.store(figures, tl.minimum(limit / (norm + 1e-6), 1.0))  # PyTorch's guard against a norm of zero
    tl.store(figures + 1, 1 - size * decay)
    tl.store(figures + 2, 1 - beta1)
    tl.store(figures + 3, 1 - beta2)
    tl.store(figures + 4, size / (1 - tl.exp2(count * tl.log2(beta1))))
    tl.store(figures + 5, tl.sqrt(1 - tl.exp2(count * tl.log2(beta2))))
    tl.store(figures + 6, eps)
    tl.store(figures + 7, tl.where(fault, 1.0, 0.0).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_flat_update(  # type: ignore[no-untyped-def]
    masters, means, squares, shadows, matrix_sums, scale_sums, figures, matrix_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    if tl.load(figures + 7) == 0:  # else every bit stays
        block = tl.program_id(0)
        place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        kind = masters.dtype.element_ty
        x, m, v = tl.load(masters + place), tl.load(means + place), tl.load(squares + place)
        if block < matrix_blocks:
            g = tl.load(matrix_sums + place).to(kind)
            keep = tl.load(figures + 1).to(kind)
        else:  # a norm scale, which does not decay
            g = tl.load(scale_sums + (place - matrix_blocks * BLOCK)).to(kind)
            keep = tl.full((), 1.0, kind)
        scale, fresh1, fresh2 = tl.load(figures), tl.load(figures + 2), tl.load(figures + 3)
        size, root, eps = tl.load(figures + 4), tl.load(figures + 5), tl.load(figures + 6)
        x, m, v = adamw(
            x, g * scale.to(kind), m, v,
            keep, fresh1.to(kind), fresh2.to(kind), size.to(kind), root.to(kind), eps.to(kind),
        )  # fmt: skip
        tl.store(masters + place, x)
        tl.store(means + place, m)
        tl.store(squares + place, v)
        if block < matrix_blocks:
            tl.store(shadows + place, x.to(shadows.dtype.element_ty))
