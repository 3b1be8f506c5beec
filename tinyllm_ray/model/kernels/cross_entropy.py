"""Projection and cross-entropy as one operator that makes the gradients in its forward pass, in chunks of rows.

Made apart, the loss of 32,768 targets over 32,000 words reads its 2.1 GB of bf16 logits twice and writes their
gradient once more, in kernels that keep the running sum of exponentials by rescaling it at every logit: 2.66 ms on an
H200. Here one kernel reads a row once and overwrites it with its gradient: 4.2 GB, 1.0 ms at 4.3 TB/s. Rows of 16
bits are held whole; of others, blocks, read again from the L1 cache. The gradient of a mean needs nothing from the
backward pass but one factor, so that no logits outlive their chunk: 0.5 GB at a time (Hsu et al., Liger Kernel, arXiv
2410.10989, section 3.2).

The bytes that decide, of C rows a chunk, V words, D features, at 4.3 TB/s and 790 TFLOP/s:

- a chunk's logits pass five times through memory (the product writes them, the kernel reads and writes them, two
  products read the gradient), beside 6 C V D operations: together about 3.5e-12 C V seconds at D = 320.
- another chunk reads and writes the weight's gradient in float32 once more, 8 V D bytes, 1.9e-12 V D seconds. That is
  D / 2C of the whole, so that C = 16 D costs 3%.
- chunks that stay in the 50 MB of L2 (512 rows) would save the kernel's read and the product's write, 1.0 ms, and pay
  63 times 82 MB for the weight's gradient, 1.2 ms, with products too small for 132 multiprocessors. Pieces of a chunk,
  multiplied and passed over one by one, leave that cost to the chunk and did not pay either: the whole loss took 4.64
  ms, and 5.67, 4.97 and 4.88 in pieces of 512, 1,024 and 2,048 rows.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from tinyllm_ray.model.losses import IGNORED

ROW_BLOCK = 8192
"""Most logits of a row that a program has in registers at a time."""
_LOGITS_A_THREAD = 16
"""Two loads of 16 bytes in bf16. With these, about 60 registers: two programs of 512 threads fit a multiprocessor and
their rows (128 KB) its L1 cache, where the second pass over a row finds it; while one waits the other computes."""
_WHOLE_ROW = 32_768
"""Most words of a row of 16-bit logits that a program holds whole; two more rows wait in its shared memory: 128 KB."""
_CHUNK_FEATURES = 16
"""Rows of a chunk for every feature, see above."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_rows: int | None = None,
    row_block: int = ROW_BLOCK,
) -> torch.Tensor:
    """Mean of -log softmax(hidden weight^T)[target] in nats, a float32 scalar (float64 for float64 operands).

    `hidden` [M, D] and `weight` [V, D] have the dtype to compute in, bfloat16, float32 or float64; `targets` [M] int64.
    Logits are rounded to that dtype, as they are in `Llama.loss` under autocast; all that is summed over a row or over
    chunks is summed in float32 at least. Like `Llama.loss` it leaves out targets of -100 (`losses.IGNORED`) and divides
    by the number of the others; a target outside the vocabulary makes the loss nan.

    `chunk_rows` limits the rows whose logits exist at a time (null: see `rows_of_chunk`), `row_block` what a program of
    the kernel holds; where that is at least V, a row is read once. Neither changes the result but for rounding.

    Raises ValueError where the shapes or dtypes do not fit.
    """
    _check(hidden, weight, targets)
    rows = rows_of_chunk(hidden.shape[0], hidden.shape[1]) if chunk_rows is None else chunk_rows
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total = _summed_with_gradients(hidden, weight, targets, rows, row_block)[0]
    else:
        total = _summed(hidden, weight, targets, rows, row_block)
    mean: torch.Tensor = total / (targets != IGNORED).sum()
    return mean


def rows_of_chunk(rows: int, features: int) -> int:
    """Rows of the equal chunks that `rows` are cut into: the power of two from 16 features on, at most.

    8,192 for 320 and 512 features, 16,384 for 640: 0.5 and 1.0 GB of logits over 32,000 words.
    """
    most = 1 << (_CHUNK_FEATURES * features - 1).bit_length()
    chunks = -(-rows // most)
    return -(-rows // chunks)


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"no loss of hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}; "
            "they have to be [M, D], [V, D] and [M]"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"no loss of {hidden.dtype} hidden states and {weight.dtype} weights; "
            "both have to be bfloat16, float32 or float64"
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("tinyllm_ray::summed_linear_cross_entropy", mutates_args=())
def _summed(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_rows: int, row_block: int
) -> torch.Tensor:
    """The sum of the losses."""
    losses = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
    logits = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight))
    for begin in range(0, len(hidden), chunk_rows):
        part = hidden[begin : begin + chunk_rows]
        of_part = torch.mm(part, weight.t(), out=logits[: len(part)])
        _over_rows(of_part, targets[begin:], losses[begin:], row_block, gradient=False)
    return losses.sum()


@torch.library.custom_op("tinyllm_ray::summed_linear_cross_entropy_with_gradients", mutates_args=())
def _summed_with_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_rows: int, row_block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the losses, and its gradients: of `hidden` in its dtype, of `weight` in the dtype of the sum.

    Opaque to the compiler, so that the chunks run one after the other and share the memory of one chunk's logits.
    """
    losses = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
    logits = hidden.new_empty(min(chunk_rows, len(hidden)), len(weight))
    of_hidden = hidden.new_empty(hidden.shape)
    of_weight = hidden.new_empty(weight.shape, dtype=losses.dtype)
    for begin in range(0, len(hidden), chunk_rows):
        part = hidden[begin : begin + chunk_rows]
        gradient = torch.mm(part, weight.t(), out=logits[: len(part)])
        _over_rows(gradient, targets[begin:], losses[begin:], row_block, gradient=True)
        torch.mm(gradient, weight, out=of_hidden[begin : begin + chunk_rows])
        _add_product(of_weight, gradient.t(), part, first=begin == 0)
    return losses.sum(), of_hidden, of_weight


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """Add left @ right to `total`, whose values do not count where it is the first, in its dtype."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif not left.is_cuda:  # PyTorch widens the result of a product on a GPU only
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=0 if first else 1, out=total)
    elif first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif _ADDS_TO_WIDE:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))


_ADDS_TO_WIDE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
"""Whether a product of bf16 can be added to float32: in 2.9 both have to be bf16 (pytorch/pytorch#167931)."""


@_summed.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_rows: int, row_block: int
) -> torch.Tensor:
    return hidden.new_empty((), dtype=_wide(hidden.dtype))


@_summed_with_gradients.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_rows: int, row_block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = _wide(hidden.dtype)
    of_weight = hidden.new_empty(weight.shape, dtype=wide)
    return hidden.new_empty((), dtype=wide), hidden.new_empty(hidden.shape), of_weight


def _keep_gradients(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # else zeros of the gradients' sizes are made for their own gradients
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[0].dtype


def _scale_gradients(ctx, upstream, *_):  # type: ignore[no-untyped-def]
    if upstream is None:
        return (None,) * 5
    of_hidden, of_weight = ctx.saved_tensors
    return of_hidden * upstream, (of_weight * upstream).to(ctx.dtype), None, None, None


_summed_with_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _over_rows(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, row_block: int, gradient: bool
) -> None:
    """Write the losses of `logits` [rows, V], contiguous; with `gradient` their gradients into `logits` as well."""
    rows, words = logits.shape
    padded = max(512, triton.next_power_of_2(words))
    processors, shared_bytes = _capacity(logits.device)
    if gradient and logits.element_size() == 2 and words <= _WHOLE_ROW and 4 * padded + 1024 <= shared_bytes:
        programs = min(rows, processors)
        tinyllm_cross_entropy_rows[(programs,)](
            logits, targets, losses, targets.stride(0), rows, programs,
            WORDS=words, BLOCK=padded, IGNORED=IGNORED,
            num_warps=max(1, padded // 1024),  # 32 logits a thread: 282 us a chunk of 8,192 rows, 299 with 64
        )  # fmt: skip
        return
    block: int = min(triton.next_power_of_2(words), row_block)
    tinyllm_cross_entropy[(rows,)](
        logits, targets, losses, targets.stride(0),
        WORDS=words, BLOCK=block, GRADIENT=gradient, IGNORED=IGNORED,
        num_warps=max(1, min(32, block // (32 * _LOGITS_A_THREAD))),
    )  # fmt: skip


@cache
def _capacity(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program can have on one: 132 and 227 KB on an H200."""
    if device.type != "cuda":
        return 2, 4 * _WHOLE_ROW + 1024  # what Triton's interpreter is held to
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@triton.jit
def _add(one, other):  # type: ignore[no-untyped-def]
    return one + other  # tl.sum would do; the interpreter runs this module's functions alone


@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_cross_entropy(  # type: ignore[no-untyped-def]
    logits, targets, losses, target_stride,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, GRADIENT: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    """A program has a row: it writes its loss, and over its logits softmax less one at the target."""
    row = tl.program_id(0).to(tl.int64)  # 131,072 rows of 32,000 words pass 2^31
    logits += row * WORDS
    target = tl.load(targets + row * target_stride)
    wide = losses.dtype.element_ty
    # Powers of two, one instruction each where those of e take five to keep denormals: 16 instructions a logit in both
    # passes instead of 27. A multiprocessor issues a row's in 4,100 of the 7,100 cycles in which memory moves it.
    log2e = tl.full([], 1.4426950408889634, wide)
    column = tl.arange(0, BLOCK)
    highest = tl.full([], -1e38, wide)  # finite, so that it can be subtracted from
    sums = tl.full([BLOCK], 0.0, wide)
    powers = sums
    for begin in range(0, WORDS, BLOCK):
        at = begin + column
        x = tl.load(logits + at, mask=at < WORDS, other=-float("inf"), eviction_policy="evict_last").to(wide)
        higher = tl.maximum(highest, tl.reduce(x, 0, _larger))
        powers = tl.exp2((x - higher) * log2e)
        sums = sums * tl.exp2((highest - higher) * log2e) + powers
        highest = higher
    counts = target != IGNORED
    known = (target >= 0) & (target < WORDS)
    # After the row, whose loads would wait for the target; before a reduction's barrier, after which others write.
    own = tl.load(logits + target, mask=known, other=float("nan")).to(wide)
    total = tl.reduce(sums, 0, _add)
    tl.store(losses + row, tl.where(counts, tl.log(total) + (highest - own), 0.0))
    if GRADIENT:
        part = tl.where(counts, 1.0 / total, 0.0)
        level = tl.where(counts, tl.log2(total), float("inf"))
        for begin in range(0, WORDS, BLOCK):
            at = begin + column
            if BLOCK < WORDS:
                x = tl.load(logits + at, mask=at < WORDS, other=-float("inf"), eviction_policy="evict_first").to(wide)
                share = tl.exp2((x - highest) * log2e - level)
            else:
                share = powers * part
            tl.store(logits + at, share, mask=at < WORDS)
        tl.debug_barrier()  # every thread has written its shares before one of them is corrected
        tl.store(logits + target, tl.exp2((own - highest) * log2e - level) - 1.0, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def tinyllm_cross_entropy_rows(  # type: ignore[no-untyped-def]
    logits, targets, losses, target_stride, rows, programs,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    """As `tinyllm_cross_entropy`, of rows that fit: one is read once, while the next ones are on their way.

    The pipeline makes copies into shared memory of the loop's loads: it wants no barrier in it, so that the target's
    share is corrected where it is computed.
    """
    log2e: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    inside = column < WORDS
    first = tl.program_id(0)
    for step in tl.range(0, (rows - first + programs - 1) // programs, num_stages=3):
        row = first + step * programs
        base = logits + row.to(tl.int64) * WORDS
        x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
        target = tl.load(targets + row * target_stride)
        counts = target != IGNORED
        known = (target >= 0) & (target < WORDS)
        own = tl.load(base + target, mask=known, other=float("nan")).to(tl.float32)
        highest = tl.maximum(tl.reduce(x, 0, _larger), -1e38)  # finite, so that it can be subtracted from
        level = highest * log2e  # rounded, and subtracted in one operation: a factor that total and powers share
        powers = tl.exp2(x * log2e - level)
        total = tl.reduce(powers, 0, _add)
        share = powers * tl.where(counts, 1.0 / total, 0.0)
        here = tl.where(known, target, -1).to(tl.int32)
        tl.store(base + column, tl.where(column == here, share - 1.0, share), mask=inside)
        tl.store(losses + row, tl.where(counts, (level + tl.log2(total)) / log2e - own, 0.0))
