"""The sections of a configuration: their settings, what is allowed, and the defaults."""

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator


def refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Integer = Annotated[int, BeforeValidator(refuse_bool)]
Number = Annotated[float, BeforeValidator(refuse_bool), Field(allow_inf_nan=False)]
Fraction01 = Annotated[Number, Field(ge=0, le=1)]

Seed = Annotated[Integer, Field(ge=-(2**63), lt=2**63)]

_OFF = BeforeValidator(lambda value: None if value == "off" else value)

Rate = Annotated[Number, Field(gt=0, le=1e38)]
"""A learning rate, kept in float32 on the device, which ends at 3.4e38."""
Betas = tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]]
Decay = Annotated[Number, Field(ge=0)]

Topology = Literal["complete", "one_peer_ring", "one_peer_exponential"]
Scheme = Literal["awc", "atc"]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """A Llama-style decoder."""

    layers: Integer = Field(gt=0, le=10_000)
    width: Integer = Field(gt=0, le=2**20)
    """Features of the residual stream."""
    heads: Integer = Field(gt=0)
    ffn: Integer = Field(gt=0, le=2**20)
    """Features inside the SwiGLU block."""
    context: Integer = Field(default=1024, gt=0, le=2**24)
    """Tokens a row, which is also the longest distance attention reaches."""
    vocab_size: Integer = Field(default=32_000, gt=1, le=2**32)
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

    peak_learning_rate: Rate
    betas: Betas
    eps: Number = Field(default=1e-8, gt=0)
    weight_decay: Decay = 0.1
    """For matrices; norm scales have none."""
    gradient_clip: Annotated[Annotated[Number, Field(gt=0)] | None, _OFF] = 1.0
    """Largest global gradient norm; `off` for none."""


class TrainingConfig(Section):
    """How long, in which steps."""

    tokens_per_update: Integer = Field(gt=0)
    tokens_per_parameter: Number = Field(default=20.0, gt=0, le=1e9)
    """Token budget as a multiple of the parameters."""
    token_budget: Integer | None = Field(default=None, gt=0, le=10**18)
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


class VariantConfig(Section):
    """What one model of an unmixed pack has of its own; null is the recipe's."""

    seed: Seed | None = None
    """Of its weights and of its order of the tokens."""
    peak_learning_rate: Rate | None = None
    betas: Betas | None = None
    weight_decay: Decay | None = None


class PackingConfig(Section):
    """Models of one shape that train side by side in one process.

    With a topology they are one decentralised training: all start from the same weights, each takes every Nth row of
    one order, and training.tokens_per_update counts the rows of all. Without one they are N trainings apart, each as
    it would be alone, and training.tokens_per_update is each one's.
    """

    models: Integer = Field(default=1, gt=0, le=4096)
    topology: Topology | None = None
    """Who averages weights with whom; null is nobody."""
    scheme: Scheme | None = None
    """Whether weights are averaged before the optimizer's step (awc) or after it (atc)."""
    consensus_start_fraction: Annotated[Fraction01 | None, _OFF] = None
    """Part of the updates after which averaging weakens with the learning rate; `off` never weakens it."""
    consensus_power: Annotated[Annotated[Number, Field(gt=0)] | None, _OFF] = None
    """Averaging weakens with the learning rate's share of its largest from then on, to this power."""
    variants: tuple[VariantConfig, ...] | None = None
    """What each model has of its own, where none are mixed."""

    @property
    def mixed(self) -> bool:
        return self.topology is not None

    @property
    def each(self) -> tuple[VariantConfig, ...]:
        """Each model's own settings, [N], the default settled."""
        return self.variants or (VariantConfig(),) * self.models

    @model_validator(mode="after")
    def _check_pack(self) -> Self:
        asked = [key for key in type(self).model_fields if key != "models" and getattr(self, key) is not None]
        if self.models == 1 and asked:
            raise ValueError(f"models 1 has no use for {', '.join(asked)}; set models to 2 or more, or leave that out")
        if self.topology is not None and self.scheme is None:
            raise ValueError(f"topology {self.topology} needs a scheme; take one of {', '.join(get_args(Scheme))}")
        if self.scheme is not None and self.topology is None:
            raise ValueError(f"scheme {self.scheme} needs a topology; take one of {', '.join(get_args(Topology))}")
        if self.variants is not None and self.mixed:
            raise ValueError(f"topology {self.topology} mixes models of one recipe; leave out variants, or topology")
        if self.variants is not None and len(self.variants) != self.models:
            raise ValueError(
                f"variants has {len(self.variants)} entries, models is {self.models}; give one for each model, "
                "{} for one with the recipe's own settings"
            )
        return self

    @model_validator(mode="after")
    def _check_consensus(self) -> Self:
        start, power = self.consensus_start_fraction, self.consensus_power
        if (start is None) != (power is None):
            raise ValueError("consensus_start_fraction and consensus_power go together; set both, or neither")
        if start is not None and not self.mixed:
            raise ValueError("consensus_start_fraction needs models that are mixed; set topology and scheme as well")
        return self


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
