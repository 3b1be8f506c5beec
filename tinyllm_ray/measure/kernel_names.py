"""What a kernel's name says: what kind of work it does, and which attention backend it belongs to.

Names are the only public evidence of which kernel ran: CUPTI's for device kernels (demangled C++ for PyTorch's own,
`nvjet_*` for cuBLAS, `cudnn_generated_*` for cuDNN, `triton_*_fused_*` for Inductor's, the function's name for Triton
kernels written by hand) and PyTorch's operators (`aten::mm`) on a CPU.

A name that fits several kinds counts for the first of them in the order of `_RULES`. Inductor's fused kernels carry the
names of all operators in them, so that the order decides often:

1. loss and attention's softmax, whose reductions over a row of logits or scores outlast whatever is fused to them
2. optimizer, gradient clipping included
3. norm, whose reduction outlasts the addition to the residual stream
4. activation, fused to the product of the gate
5. rotary, known by a product together with a difference or a negation
6. copy, if nothing but moving, casting and filling is named
7. other

What a name cannot say: eager PyTorch runs rotary positions, and on a CPU most of RMSNorm, as plain products and sums,
which count as other (and copy); math attention's two products look like any matrix product, so that only its softmax
counts as attention; `sum` kernels of gradients count as other.
"""

import re
from typing import Literal

from tinyllm_ray.records import KernelCategory

Backend = Literal["flash", "flash3", "flash4", "cudnn", "efficient", "flex", "math"]

_FUSED = re.compile(r"(?:triton|cpp)_(?:[a-z]+_)?fused_(.*)")
_TEMPLATE = re.compile(r"triton_(?:tem_fused_|mm|bmm|flex_attention)")
"""Inductor's Triton templates: matrix products and flex attention, with other operators fused to their ends."""
_OWN = "tinyllm_"
"""How names of this package's Triton kernels may begin; the rest says what they do, in the words of `_FUSED_RULES`."""
_FUNCTION = re.compile(r"[a-z_][a-z0-9_]*")
"""A Triton kernel written by hand is called what its function is."""

# Order matters: cuDNN's kernels have `flash` in their names. FlashAttention 3's are classes, in whatever namespace;
# FlashAttention 4's are called what CuTe calls the method that they were made from.
_FUSED_ATTENTION: tuple[tuple[Backend, re.Pattern[str]], ...] = (
    ("cudnn", re.compile(r"cudnn\w*_(?:sdpa|fmha)|cudnn::fusion::(?:compute_dot_do_o|convert_dq)|_cudnn_attention")),
    ("efficient", re.compile(r"fmha_cutlass|PyTorchMemEffAttention|Attention(?:Backward)?Kernel|_efficient_attention")),
    ("flash3", re.compile(r"FlashAttn(?:Fwd|Bwd)")),
    ("flash4", re.compile(r"kernel_cutlass\w*flash_attn_?cute")),
    ("flash", re.compile(r"flash_(?:fwd|bwd)|pytorch_flash::|FlashAttn|FlashAttention|_flash_attention")),
)
_BACKWARD = re.compile(r"bprop|bwd|backward|fmha_cutlassB|dot_do_o|convert_dq", re.IGNORECASE)

# Template arguments: input, output and accumulator types, log2 of the length, is_log_softmax, is_masked.
_LOG_WARP_SOFTMAX = re.compile(r"softmax_warp_(?:forward|backward)<[^>]*?,\s*(?:\(int\))?\d+,\s*(?:\(bool\)1|true)\b")
_PLAIN_SOFTMAX = re.compile(
    r"softmax_warp_(?:forward|backward)|(?<!Log)SoftMax(?:Forward|Backward)Epilogue"
    r"|aten::(?:_safe|_masked)?_?softmax|aten::_softmax_backward|_scaled_dot_product_attention_math"
)
_FUSED_SOFTMAX = re.compile(r"_safe_softmax|(?<!log)(?<!prepare)_softmax")

_RULES: tuple[tuple[KernelCategory, re.Pattern[str]], ...] = (
    ("loss", re.compile(r"cunn_SoftMax|softmax_warp|log_?softmax|nll_loss|cross_entropy", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor_apply|aten::_foreach|fused_?adam|linalg_vector_norm", re.IGNORECASE)),
    (
        "norm",
        re.compile(
            r"layer_?norm|rms_?norm|GammaBetaBackward|RowwiseMoments|ComputeInternalGradients|aten::(?:pow|rsqrt)$",
            re.I,
        ),
    ),
    ("activation", re.compile(r"silu|gelu|sigmoid|relu", re.IGNORECASE)),
    (
        "matmul",
        re.compile(
            r"nvjet|gemm|gemv|cutlass|cublas|splitK|aten::(?:mm|bmm|addmm|baddbmm|matmul|linear|addmv|mv|dot)$"
            r"|_mkl_linear|mkldnn::_linear",
            re.IGNORECASE,
        ),
    ),
    (
        "copy",
        re.compile(
            r"^Mem(?:cpy|set)|copy_kernel|CatArrayBatchedCopy|FillFunctor"
            r"|aten::(?:copy_|_to_copy|clone|contiguous|cat|stack|fill_|zero_|to)$"
        ),
    ),
)

_MOVES = (
    *("to_copy", "unsafe_view", "slice_scatter", "select_scatter", "as_strided", "constant_pad_nd", "transpose"),
    *("unsqueeze", "squeeze", "permute", "reshape", "detach", "expand", "select", "unbind", "clone", "empty", "stack"),
    *("split", "slice", "zeros", "copy", "view", "full", "cat", "t"),
)
_LOSS_WORDS = re.compile(r"log_softmax|nll_loss|cross_entropy")
_FUSED_RULES: tuple[tuple[KernelCategory, re.Pattern[str]], ...] = (
    # The first half of a long softmax that Inductor split; the scores' is seldom that long.
    ("loss", re.compile(rf"{_LOSS_WORDS.pattern}|prepare_softmax_online")),
    ("optimizer", re.compile(r"_foreach|adam|addcdiv|lerp|clip|optimizer")),
    ("norm", re.compile(r"_norm|rsqrt|_pow")),
    ("activation", re.compile(r"silu|gelu|sigmoid|relu|swiglu")),
    ("rotary", re.compile(r"_(?:cos|sin|rotary|rope|rotate)(?=_|$)|_mul_(?:.*_)?(?:sub|neg)(?=_|$)")),
    ("copy", re.compile(rf"(?:_+(?:{'|'.join(_MOVES)}))*_*\d*")),
)
# In an Inductor name a product is only what a bias is added to.
_OWN_PRODUCT = re.compile(r"matmul|linear")
_OWN_OPTIMIZER = re.compile(r"(?:^|_)(?:collect|settle|update|gradient_norm)(?:_|$)")
_OWN_LOSS = re.compile(rf"{_LOSS_WORDS.pattern}|(?:^|_)loss(?:_|$)")
# A fused kernel that only rearranges what attention returned is named after it, on whatever backend attention ran.
_REARRANGED_ATTENTION = re.compile(r"_scaled_dot_product_(?:[a-z]+_)*?attention(?:_for_cpu)?(?:_backward)?")


def categorize(name: str) -> KernelCategory:
    """The kind of work of the kernel or operator called `name`."""
    if name.startswith(_OWN):
        return _categorize_own(name.removeprefix(_OWN))
    if _TEMPLATE.match(name):
        return _attention(name) if "flex_attention" in name else "matmul"
    if fused := _FUSED.match(name):
        return _categorize_fused("_" + fused[1])
    if attention_backend_of(name) is not None or name == "aten::scaled_dot_product_attention":
        return _attention(name)
    known = next((category for category, pattern in _RULES if pattern.search(name)), None)
    return known or (_categorize_own(name) if _FUNCTION.fullmatch(name) else "other")


def attention_backend_of(name: str) -> Backend | None:
    """The backend that a kernel or operator is evidence of; None where it is none.

    What Inductor fused is named after operators, not after kernels: `..._scaled_dot_product_flash_attention_backward_
    stack_9` only rearranges gradients, so that of a fused name only a softmax says something, for math.
    """
    if _TEMPLATE.match(name):
        return "flex" if "flex_attention" in name else None
    if fused := _FUSED.match(name):
        words = "_" + fused[1]
        return "math" if _has_scores_softmax(words) else None
    for backend, pattern in _FUSED_ATTENTION:
        if pattern.search(name):
            return backend
    return "math" if _PLAIN_SOFTMAX.search(name) and not _LOG_WARP_SOFTMAX.search(name) else None


def _attention(name: str) -> KernelCategory:
    return "attention_backward" if _BACKWARD.search(name) else "attention_forward"


def _categorize_own(name: str) -> KernelCategory:
    """Of a kernel written by hand."""
    if _OWN_LOSS.search(name):
        return "loss"
    if _OWN_OPTIMIZER.search(name):
        return "optimizer"
    return "matmul" if _OWN_PRODUCT.search(name) else _categorize_fused("_" + name)


def _has_scores_softmax(words: str) -> bool:
    return bool(_FUSED_SOFTMAX.search(words)) and not _LOSS_WORDS.search(words)


def _categorize_fused(words: str) -> KernelCategory:
    own_attention = "attention" in words and not _REARRANGED_ATTENTION.search(words)
    words = _REARRANGED_ATTENTION.sub("", words)
    if own_attention or _has_scores_softmax(words):
        return _attention(words)
    for category, pattern in _FUSED_RULES:
        if pattern.fullmatch(words) if category == "copy" else pattern.search(words):
            return category
    return "other"
