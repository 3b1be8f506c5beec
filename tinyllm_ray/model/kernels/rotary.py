"""Rotary positions from the fused projection to attention's operands, and back: one Triton kernel each way.

Layout. Flash, cuDNN and memory-efficient attention all take query, key and value [B, H, T, F] with any strides whose
last is one. A head's features are 128 bytes (F = 64 in bfloat16), a whole cache line, so that heads side by side in
memory ([B, T, H, F], seen as [B, H, T, F]) read as well as heads apart. And the attended values, which all of them
return in the query's layout, then are the output projection's [B, T, H F] without a pass to rearrange them.

Value is moved, though attention could read it inside the projection: that would keep the whole projection until the
backward pass, 63 MB a layer beside the 42 MB of query and key (20m, 32,768 targets), where moved value takes 21; and
its gradient could not join the other two in one kernel. Moving costs 0.08 ms of an update.

Bytes per element of the stream, bfloat16: 3 x (2 read + 2 written) = 12, forward as backward; the float32 tables are
256 bytes a token and stay in the L2 cache. Floor for 32,768 targets of 20m (8 layers of 320) at 4.3 TB/s: 0.23 ms each
way.

Inductor fuses the rotation into one or two kernels and leaves value where it is: 8 bytes forward. Backward it rotates
in one pass and lays the three gradients side by side in another: 8 to 12 bytes more than here, at most 0.23 ms to save.
"""

from functools import cache

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Pairs of features that a program of four warps holds at a time: 8 a thread, the 16 bytes of a load."""


def rotate_projection(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `Operations.rotate`; the three are [B, H, T, F] views of [B, T, H, F] in memory of their own."""
    query, key, value = _rotate(qkv, cos, sin)
    return query, key, value


@torch.library.custom_op(
    "tinyllm_ray::rotate", mutates_args=(), schema="(Tensor qkv, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)"
)
def _rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = _allocate_forward(qkv, cos, sin)
    _launch([part.transpose(1, 2) for part in qkv.unbind(2)], outputs, cos, sin, back=False)
    return outputs


def _allocate_forward(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, tokens, _, heads, features = qkv.shape
    query, key, value = (qkv.new_empty(rows, tokens, heads, features).transpose(1, 2) for _ in range(3))
    return query, key, value


@torch.library.custom_op(
    "tinyllm_ray::rotate_backward",
    mutates_args=(),
    schema="(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor cos, Tensor sin) -> Tensor",
)
def _rotate_backward(
    dquery: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The projection's gradient [B, T, 3, H, F]; gradients come in whatever layout attention leaves them in."""
    dqkv = _allocate_backward(dquery, dkey, dvalue, cos, sin)
    _launch((dquery, dkey, dvalue), [part.transpose(1, 2) for part in dqkv.unbind(2)], cos, sin, back=True)
    return dqkv


def _allocate_backward(
    dquery: torch.Tensor, dkey: torch.Tensor, dvalue: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    rows, heads, tokens, features = dquery.shape
    return dquery.new_empty(rows, tokens, 3, heads, features)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx, *gradients):  # type: ignore[no-untyped-def]
    return _rotate_backward(*gradients, *ctx.saved_tensors), None, None


_rotate.register_fake(_allocate_forward)
_rotate_backward.register_fake(_allocate_backward)
_rotate.register_autograd(_differentiate, setup_context=_save)


def _launch(sources, targets, cos, sin, back: bool) -> None:  # type: ignore[no-untyped-def]
    """Rotate the first two of three [B, H, T, F] into the targets, and copy the third; `back` turns the other way."""
    # A stride of one on the features is all that the kernel asks for; an expanded gradient has none.
    sources = [source if source.stride(3) == 1 else source.contiguous() for source in sources]
    rows, heads, tokens, features = targets[0].shape
    half = features // 2
    block, padded = _tile(tokens, half)
    blocks = -(-tokens // block)
    tinyllm_rotary[(rows * blocks, 3)](
        *sources, *targets, cos.contiguous(), sin.contiguous(), tokens, blocks,
        *(stride for source in sources for stride in source.stride()[:3]), *targets[0].stride()[:3],
        HEADS=heads, HALF=half, PADDED=padded, BLOCK=block, BACK=back,
        WIDE=tl.float64 if targets[0].dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip


@cache
def _tile(tokens: int, half: int) -> tuple[int, int]:
    """Tokens and pairs of features of a program, powers of two."""
    padded = triton.next_power_of_2(half)
    return max(1, min(_TILE // padded, triton.next_power_of_2(tokens))), padded


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    source, target, source_head, target_head, cosine, sine, inside,
    HEADS: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All heads of some tokens; `source` and `target` are pointers to the first half of the first head's features."""
    for head in range(HEADS):
        here, there = source + head * source_head, target + head * target_head
        first, second = tl.load(here, mask=inside), tl.load(here + HALF, mask=inside)
        if TURNS:
            one, other = first.to(WIDE), second.to(WIDE)
            first, second = one * cosine - other * sine, other * cosine + one * sine
        tl.store(there, first, mask=inside)
        tl.store(there + HALF, second, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_rotary(  # type: ignore[no-untyped-def]
    query, key, value, to_query, to_key, to_value, cos, sin, tokens, blocks,
    query_row, query_head, query_token, key_row, key_head, key_token, value_row, value_head, value_token,
    to_row, to_head, to_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    BACK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK tokens of a row, in all heads of query, key or value, whose tables it reads once."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, PADDED)[None, :]
    inside = (token < tokens)[:, None] & (pair < HALF)
    token = token[:, None].to(tl.int64)
    cosine = tl.load(cos + token * HALF + pair, mask=inside, other=0.0).to(WIDE)
    sine = tl.load(sin + token * HALF + pair, mask=inside, other=0.0).to(WIDE)
    if BACK:
        sine = -sine
    place = row * to_row + token * to_token + pair
    if tl.program_id(1) == 0:
        start = query + row * query_row + token * query_token + pair
        _turn(start, to_query + place, query_head, to_head, cosine, sine, inside, HEADS, HALF, True, WIDE)
    elif tl.program_id(1) == 1:
        start = key + row * key_row + token * key_token + pair
        _turn(start, to_key + place, key_head, to_head, cosine, sine, inside, HEADS, HALF, True, WIDE)
    else:
        start = value + row * value_row + token * value_token + pair
        _turn(start, to_value + place, value_head, to_head, cosine, sine, inside, HEADS, HALF, False, WIDE)
