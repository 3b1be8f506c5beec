"""The sections of a configuration: their settings, what is allowed, and the defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Fraction01 = Annotated[Number, Field(ge=0, le=1)]

Seed = Annotated[Integer, Field(ge=-(2**63), lt=2**63)]

Update = Literal["eager", "compiled"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
SdpaBackend = Literal["auto", "flash", "cudnn", "efficient", "math"]

CPU_SDPA_BACKENDS = ("auto", "flash", "math")
"""PyTorch has no CPU kernels for the cuDNN and memory-efficient backends and raises when only those are allowed."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """A Llama-style decoder."""

    layers: Integer = Field(gt=0)
    width: Integer = Field(gt=0)
    """Features of the residual stream."""
    heads: Integer = Field(gt=0)
    ffn: Integer = Field(gt=0)
    """Features inside the SwiGLU block."""
    context: Integer = Field(default=1024, gt=0)
    """Tokens a row, which is also the longest distance attention reaches."""
    vocab_size: Integer = Field(default=32_000, gt=1)
    rope_theta: Number = Field(default=10_000.0, gt=0)
    norm_eps: Number = Field(default=1e-5, gt=0)
    init_std: Number = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width {self.width} must be heads ({self.heads}) times an even number of features")
        return self

    @property
    def parameters(self) -> int:
        """Number of weights; the output projection is the embedding."""
        layer = 4 * self.width**2 + 3 * self.width * self.ffn + 2 * self.width
        return self.vocab_size * self.width + self.layers * layer + self.width


class DataConfig(Section):
    """Which tokens, in which order."""

    cache: Annotated[str, Field(min_length=1)] | None = None
    """Folder of a prepared token cache; null is the default corpus, built on first use."""
    shards_per_range: Integer = Field(default=2, gt=0)
    """Shards that are read and shuffled together."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    peak_learning_rate: Number = Field(gt=0, le=1e38)
    """Kept in float32 on the device, which ends at 3.4e38."""
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]]
    eps: Number = Field(default=1e-8, gt=0)
    weight_decay: Number = Field(default=0.1, ge=0)
    """For matrices; norm scales have none."""
    gradient_clip: Annotated[
        Annotated[Number, Field(gt=0)] | None, BeforeValidator(lambda value: None if value == "off" else value)
    ] = 1.0
    """Largest global gradient norm; `off` for none."""


class TrainingConfig(Section):
    """How long, in which steps."""

    tokens_per_update: Integer = Field(gt=0)
    tokens_per_parameter: Number = Field(default=20.0, gt=0)
    """Token budget as a multiple of the parameters."""
    token_budget: Integer | None = Field(default=None, gt=0)
    """Token budget as a number; overrides tokens_per_parameter."""
    epochs: Integer = Field(default=40, gt=0)
    """Virtual epochs the budget is divided into; each ends with an evaluation."""
    epoch_tokens_per_parameter: Number | None = Field(default=None, gt=0)
    """Length of an epoch as a multiple of the parameters (the last may be shorter); overrides epochs."""
    schedule: Literal["cosine", "warmup-stable-decay"] = "cosine"
    warmup_fraction: Fraction01 = 0.05
    decay_fraction: Fraction01 = 0.2
    """Last part of the updates, in which warmup-stable-decay lowers the rate; cosine lowers it from the peak on.

    Zero, a rate that stays at the peak, goes with final_fraction 1 only.
    """
    final_fraction: Fraction01 = 0.1
    """Last learning rate as a fraction of the peak."""
    max_updates: Integer | None = Field(default=None, gt=0)
    """Ends a run early; the schedule stays that of the whole budget."""
    seed: Seed = 42

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "warmup-stable-decay" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} sum up to more than 1"
            )
        if self.schedule == "warmup-stable-decay" and not self.decay_fraction and self.final_fraction != 1:
            raise ValueError(
                f"decay_fraction 0 never reaches final_fraction {self.final_fraction}; take final_fraction 1 to stay "
                "at the peak, or a decay_fraction above 0"
            )
        return self


class EvaluationConfig(Section):
    """Validation during and after training."""

    subset_blocks: Integer = Field(default=1024, gt=0)
    """Rows of the fixed subset that epoch evaluations use (all of them where the split has fewer)."""
    subset_seed: Seed = 12345


class ExecutionConfig(Section):
    """How an update runs on the machine; none of it changes what is learned."""

    micro_batch_size: Integer | None = Field(default=None, gt=0)
    """Rows a forward and backward pass; null is the largest of 8, 16 and 32 that divides the update."""
    update: Update = "eager"
    compile_mode: CompileMode | None = None
    """torch.compile's mode where update is compiled (null is default), meaningless elsewhere."""
    sdpa_backend: SdpaBackend = "auto"
    cpu_threads: Integer | None = Field(default=None, gt=0, le=1024)
    """Threads of CPU operators; null is every core the process may use, at most 8 beside a GPU."""
    prefetch_depth: Integer = Field(default=1, ge=0)
    """Ranges of the token cache read ahead."""
    deterministic: StrictBool = False
    """Whether equal runs on one machine have to give equal bits; slower, and refused with what cannot promise it."""
    data_parallel: Annotated[Literal[1], BeforeValidator(_refuse_bool)] = 1

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
        if values.get("update") == "compiled":
            return {**values, "compile_mode": mode or "default"}
        # Checked as if it were used, then dropped: two eager executions never differ by it.
        return {**values, "compile_mode": None} if mode is None or mode in get_args(CompileMode) else values


class EvaluationExecutionConfig(Section):
    """How validation runs on the machine; none of it changes what it finds."""

    micro_batch_size: Integer | None = Field(default=None, gt=0)
    """Rows a forward pass; null is the training's, and at least 131,072 tokens on a GPU."""
    update: Update | None = None
    """Whether the loss is compiled; null is as in training on a GPU where enough is evaluated for that to pay, else
    eager."""


class OutputConfig(Section):
    """What a run leaves behind."""

    checkpoint: Literal["none", "final", "interval", "explicit"] = "final"
    """When weights and training state are written; all but none write them also where a run is interrupted."""
    checkpoint_interval: Integer | None = Field(default=None, gt=0)
    """Updates from one checkpoint to the next, for interval."""
    checkpoint_updates: tuple[Annotated[Integer, Field(gt=0)], ...] | None = None
    """Update counts to write one at, for explicit."""
    keep_checkpoints: Integer | None = Field(default=2, gt=0)
    """Newest checkpoints that stay, beside those of explicit; null is all."""
    tensorboard: StrictBool = False
    """Whether metrics are also written as TensorBoard event files."""

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if self.checkpoint == "interval" and self.checkpoint_interval is None:
            raise ValueError("checkpoint interval needs output.checkpoint_interval, like 1000")
        if self.checkpoint == "explicit" and not self.checkpoint_updates:
            raise ValueError("checkpoint explicit needs output.checkpoint_updates, like [100, 1000]")
        for policy, key in (("interval", "checkpoint_interval"), ("explicit", "checkpoint_updates")):
            if self.checkpoint != policy and getattr(self, key) is not None:
                raise ValueError(f"{key} goes with checkpoint {policy}, not {self.checkpoint}; set one of them anew")
        return self
