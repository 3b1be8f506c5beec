"""Rotary positions inside the projection to query, key and value, which attention reads where the product wrote them.

Of the 12 bytes per element of the stream that `rotary` moves forward, none are left; beside them the projection's own
writing (6) stays. 32,768 targets of 20m: 0.23 ms less at 4.3 TB/s, and 8 kernels less. Backward is `rotary`'s.

A head's two halves lie in the same thread's registers after the product, so that turning them moves nothing.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tinyllm_ray.model.kernels.linear import linear_gradients
from tinyllm_ray.model.kernels.rotary import _rotate_backward

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
"""Of a tile, and of a step of its sum; eight warps keep a tile and its tables in 121 registers, for two programs a
multiprocessor."""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fits(dtype: torch.dtype, weight: torch.Tensor, heads: int) -> bool:
    """Whether `rotated_projection` can be computed in `dtype`: 16 bits, one model, heads of 16 to 128 features, 2^n."""
    if weight.ndim != 2:
        return False
    features = weight.shape[0] // (3 * heads)
    sixteen_bits = dtype in (torch.bfloat16, torch.float16)
    return sixteen_bits and features in (16, 32, 64, 128) and weight.shape[1] % 8 == 0


def rotated_projection(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> Triple:
    """Query and key, rotated, and value of x weight^T: `x` [B, T, D] and `weight` [3 H F, D] of one dtype, tables
    [T, F/2] in float32; each [B, H, T, F], views of [B, T, H, F] in memory of their own.

    The product is rounded to its dtype before it is turned, as it is where the two are apart.
    """
    rows, tokens, width = x.shape
    made = _project(x.reshape(-1, width), weight, cos, sin, tokens)
    query, key, value = (part.view(rows, tokens, heads, -1).transpose(1, 2) for part in made)
    return query, key, value


@torch.library.custom_op("tinyllm_ray::rotated_projection", mutates_args=())
def _project(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, [M, H F] each."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, width = x.shape
    whole = len(weight) // 3
    outputs = tuple(x.new_empty(rows, whole) for _ in range(3))
    tiles = -(-whole // _COLUMNS)
    tinyllm_matmul_rotary[(-(-rows // _ROWS) * 3 * tiles,)](
        _described(x, _ROWS, _DEPTH), _described(weight.view(3, whole, width), 1, _COLUMNS, _DEPTH),
        cos.contiguous(), sin.contiguous(), *(_described(output, _ROWS, _COLUMNS) for output in outputs), tokens,
        TILES=tiles, WIDTH=width, HALF=cos.shape[1], ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    query, key, value = outputs
    return query, key, value


@_project.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (x.new_empty(len(x), len(weight) // 3) for _ in range(3))
    return query, key, value


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4])
    ctx.tokens = inputs[4]


def _differentiate(ctx, *gradients):  # type: ignore[no-untyped-def]
    x, weight, cos, sin = ctx.saved_tensors
    heads = (-1, ctx.tokens, len(weight) // (6 * cos.shape[1]), 2 * cos.shape[1])
    parts = (gradient.reshape(heads).transpose(1, 2) for gradient in gradients)
    gradient = _rotate_backward(*parts, cos, sin).view(len(x), len(weight))
    return *linear_gradients(gradient, x, weight), None, None, None


_project.register_autograd(_differentiate, setup_context=_save)


def _described(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_matmul_rotary(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, query, key, value, tokens,
    TILES: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program has COLUMNS of query, key or value, whole heads of which the last tile may lack some."""
    heads: tl.constexpr = COLUMNS // (2 * HALF)
    row, tile = tl.program_id(0) // (3 * TILES) * ROWS, tl.program_id(0) % (3 * TILES)
    part, column = tile // TILES, tile % TILES * COLUMNS
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for begin in range(0, WIDTH, DEPTH):
        block = tl.reshape(weight.load([part, column, begin]), (COLUMNS, DEPTH))
        total = tl.dot(x.load([row, begin]), block.T, total)
    product = total.to(query.dtype)
    if part == 2:
        value.store([row, column], product)
    else:
        at = ((row + tl.arange(0, ROWS)) % tokens)[:, None] * HALF + tl.arange(0, HALF)[None, :]
        cosine, sine = tl.load(cos + at)[:, None, :], tl.load(sin + at)[:, None, :]
        pairs = tl.permute(tl.reshape(product.to(tl.float32), (ROWS, heads, 2, HALF)), (0, 1, 3, 2))
        one, other = tl.split(pairs)
        turned = tl.join(one * cosine - other * sine, other * cosine + one * sine)
        turned = tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (ROWS, COLUMNS)).to(query.dtype)
        if part == 0:
            query.store([row, column], turned)
        else:
            key.store([row, column], turned)
