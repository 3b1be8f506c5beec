"""How an update runs on the machine: the settings a search may vary, none of which changes what is learned."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from tinyllm_ray.sections import Integer, Section, refuse_bool

Update = Literal["eager", "compiled", "graph"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
SdpaBackend = Literal["auto", "flash", "flash3", "flash4", "cudnn", "efficient", "flex", "math"]
Kernel = Literal["torch", "triton"]
PackedBackward = Literal["at_once", "one_by_one", "processes"]

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The compile modes that replay CUDA graphs."""

GRAPH_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
"""The compile modes whose code a graph of the whole update can capture."""

HOST_KEYS = frozenset({"cpu_threads", "prefetch_depth"})
"""Execution settings that no compiled code depends on: candidates that differ only here share a compilation."""

CPU_SDPA_BACKENDS = ("auto", "flash", "math")
"""PyTorch has no CPU kernels for the cuDNN and memory-efficient backends and raises when only those are allowed."""

DEFAULT_MICRO_BATCH_SIZES = (32, 16, 8)

_ONE_BY_ONE_ROWS = 32
"""Rows of a micro-batch from which one model's matrix products fill a GPU: packing them gains nothing (20m, H200)."""


class ExecutionConfig(Section):
    """How an update runs on the machine; none of it changes what is learned."""

    micro_batch_size: Integer | None = Field(default=None, gt=0)
    """Rows of a model in a forward and backward pass; null is the largest of 8, 16, 32 that divides its update."""
    update: Update = "eager"
    """eager: operator by operator; compiled: forward and backward through torch.compile; graph: the same, and the whole
    update captured in one CUDA graph and replayed."""
    compile_mode: CompileMode | None = None
    """torch.compile's mode where update is compiled or graph (null is default), meaningless elsewhere."""
    sdpa_backend: SdpaBackend = "auto"
    cpu_threads: Integer | None = Field(default=None, gt=0, le=1024)
    """Threads of CPU operators; null is every core the process may use, at most 8 beside a GPU."""
    prefetch_depth: Integer = Field(default=1, ge=0, le=1024)
    """Ranges of the token cache read ahead."""
    deterministic: StrictBool = False
    """Whether equal runs on one machine have to give equal bits; slower, and refused with what cannot promise it."""
    loss_kernel: Kernel = "torch"
    """triton: projection and cross-entropy in chunks, the gradient made in the same pass over the logits."""
    norm_kernel: Kernel = "torch"
    """triton: the residual's sum and its RMSNorm in one kernel."""
    rotary_kernel: Kernel = "torch"
    """triton: positions turned inside the projection before them, beside it where its shape or the GPU does not fit."""
    activation_kernel: Kernel = "torch"
    """triton: SwiGLU inside the products around it, between them where their shapes or the GPU do not fit."""
    optimizer_kernel: Kernel = "torch"
    """triton: clip and AdamW over one flat buffer, which also holds the matrices in bf16 for the forward pass."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the residual stream on a GPU."""
    recompute_activations: StrictBool = False
    """Whether a block's activations are computed again in the backward pass instead of kept: less memory, more time."""
    packed_backward: PackedBackward | None = None
    """Whether packed models pass backward at once, one by one, or each in a process of its own on the same device;
    null is one by one from micro-batches of 32 rows on, else at once.

    Meaningless where there is one model.
    """
    data_parallel: Annotated[Literal[1], BeforeValidator(refuse_bool)] = 1

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        if self.deterministic and self.sdpa_backend == "cudnn":
            raise ValueError("deterministic forbids sdpa_backend cudnn, whose gradients are not; take flash or math")
        if self.deterministic and str(self.compile_mode).startswith("max-autotune"):
            raise ValueError(
                f"deterministic forbids compile_mode {self.compile_mode}, which chooses kernels by their timing; "
                "take default or reduce-overhead"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _settle_compile_mode(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        mode = values.get("compile_mode")
        if values.get("update") == "graph" and mode in CUDA_GRAPH_MODES:
            raise ValueError(
                f"update graph captures the update itself; compile_mode {mode} would capture parts of it: take one of "
                + ", ".join(GRAPH_COMPILE_MODES)
            )
        if values.get("update") in ("compiled", "graph"):  # a list, as spaces have, is for pydantic to refuse
            return {**values, "compile_mode": mode or "default"}
        # Checked as if it were used, then dropped: two eager executions never differ by it.
        return {**values, "compile_mode": None} if mode is None or mode in get_args(CompileMode) else values


def needs_gpu(key: str, value: object) -> bool:
    """Whether the execution setting `key` can have `value` on a GPU only."""
    if key == "sdpa_backend":
        return value not in CPU_SDPA_BACKENDS
    return (key, value) in {("update", "graph"), ("residual_dtype", "bfloat16")} or value == "triton"


def forbids_determinism(key: str, value: object) -> bool:
    """Whether an execution whose setting `key` is `value` cannot promise equal bits."""
    return (key, value) == ("sdpa_backend", "cudnn") or (
        key == "compile_mode" and str(value).startswith("max-autotune")
    )


def options_of(key: str) -> tuple[str, ...]:
    """The values of an execution setting that names one of several."""
    return get_args(ExecutionConfig.model_fields[key].annotation)


def default_micro_batch_size(rows: int) -> int:
    """The largest of 32, 16, 8 that divides `rows`, else all of them in one."""
    return next((size for size in DEFAULT_MICRO_BATCH_SIZES if rows % size == 0), rows)


def default_packed_backward(micro_batch_size: int) -> PackedBackward:
    """One by one where a micro-batch of one model is large enough to fill a device, else all models at once."""
    return "one_by_one" if micro_batch_size >= _ONE_BY_ONE_ROWS else "at_once"


class EvaluationExecutionConfig(Section):
    """How validation runs on the machine; none of it changes what it finds."""

    micro_batch_size: Integer | None = Field(default=None, gt=0)
    """Rows a forward pass; null is the training's, and at least 131,072 tokens on a GPU."""
    update: Literal["eager", "compiled"] | None = None
    """Whether the loss is compiled; null is as in training on a GPU where enough is evaluated for that to pay, else
    eager."""
