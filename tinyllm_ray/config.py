"""What is trained (the recipe) and how it is run (the execution), as validated models.

A configuration has the sections model, data, optimizer, training and evaluation (together the recipe, which has an
identity), execution (which may change speed and nothing else) and output. It is read from a preset, a YAML file
that may name a preset to start from, and `--set dotted.key=value`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import dump_yaml, parse_yaml, read_mapping


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Integer = Annotated[int, BeforeValidator(_refuse_bool)]
Number = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
Fraction01 = Annotated[Number, Field(ge=0, le=1)]

Update = Literal["eager", "compiled"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
SdpaBackend = Literal["auto", "flash", "cudnn", "efficient", "math"]

CPU_SDPA_BACKENDS = ("auto", "flash", "math")
"""PyTorch has no CPU kernels for the cuDNN and memory-efficient backends and raises when only those are allowed."""

DEFAULT_MICRO_BATCH_SIZES = (32, 16, 8)


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

    cache: str | None = None
    """Folder of a prepared token cache; null is the default corpus, built on first use."""
    shards_per_range: Integer = Field(default=2, gt=0)
    """Shards that are read and shuffled together."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    peak_learning_rate: Number = Field(gt=0)
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
    schedule: Literal["cosine"] = "cosine"
    warmup_fraction: Fraction01 = 0.05
    final_fraction: Fraction01 = 0.1
    """Last learning rate as a fraction of the peak."""
    max_updates: Integer | None = Field(default=None, gt=0)
    """Ends a run early; the schedule stays that of the whole budget."""
    seed: Integer = 42


class EvaluationConfig(Section):
    """Validation during and after training."""

    subset_blocks: Integer = Field(default=1024, gt=0)
    """Rows of the fixed subset that epoch evaluations use (all of them where the split has fewer)."""
    subset_seed: Integer = 12345


class ExecutionConfig(Section):
    """How an update runs on the machine; none of it changes what is learned."""

    micro_batch_size: Integer | None = Field(default=None, gt=0)
    """Rows a forward and backward pass; null is the largest of 8, 16 and 32 that divides the update."""
    update: Update = "eager"
    compile_mode: CompileMode | None = None
    """torch.compile's mode where update is compiled (null is default), meaningless elsewhere."""
    sdpa_backend: SdpaBackend = "auto"
    cpu_threads: Integer | None = Field(default=None, gt=0)
    """Threads of CPU operators; null is every core the process may use, at most 8 beside a GPU."""
    prefetch_depth: Integer = Field(default=1, ge=0)
    """Ranges of the token cache read ahead."""
    data_parallel: Annotated[Literal[1], BeforeValidator(_refuse_bool)] = 1

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


class OutputConfig(Section):
    """What a run leaves behind."""

    checkpoint: Literal["none", "final"] = "final"


class Config(Section):
    """A complete configuration."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    execution: ExecutionConfig = ExecutionConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _check_division(self) -> Self:
        tokens, context = self.training.tokens_per_update, self.model.context
        if tokens % context:
            raise ValueError(f"training.tokens_per_update {tokens} must be a multiple of model.context {context}")
        micro = self.execution.micro_batch_size
        if micro is not None and self.rows_per_update % micro:
            raise ValueError(
                f"execution.micro_batch_size {micro} must divide the {self.rows_per_update} rows of an update "
                f"(training.tokens_per_update {tokens} / model.context {context})"
            )
        return self

    @property
    def rows_per_update(self) -> int:
        return self.training.tokens_per_update // self.model.context

    @property
    def micro_batch_size(self) -> int:
        """Rows a forward and backward pass, the default settled."""
        chosen = self.execution.micro_batch_size
        return chosen or default_micro_batch_size(self.rows_per_update)

    @property
    def accumulation(self) -> int:
        """Micro-batches an update."""
        return self.rows_per_update // self.micro_batch_size

    @property
    def token_budget(self) -> Fraction:
        """Targets of the whole recipe; exact, since updates are rounded from it."""
        training = self.training
        if training.token_budget is not None:
            return Fraction(training.token_budget)
        return Fraction(training.tokens_per_parameter) * self.model.parameters

    @property
    def recipe_identity(self) -> str:
        """SHA-256 over what is learned: neither where the cache lies nor where a run is cut changes it."""
        recipe = self.model_dump(mode="json", include={"model", "data", "optimizer", "training", "evaluation"})
        del recipe["data"]["cache"], recipe["training"]["max_updates"]
        return identity(recipe)

    def with_execution(self, settings: Mapping[str, Any]) -> "Config":
        """The same recipe under other execution settings; those not named stay."""
        values = self.model_dump(mode="json")
        values["execution"] |= settings
        return validate(values, "execution")

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


def default_micro_batch_size(rows: int) -> int:
    """The largest of 32, 16, 8 that divides `rows`, else all of them in one."""
    return next((size for size in DEFAULT_MICRO_BATCH_SIZES if rows % size == 0), rows)


def identity(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def preset_names() -> list[str]:
    """Names of the presets that ship with the package, smallest model first."""
    folder = resources.files("tinyllm_ray.model") / "presets"
    names = [entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted(names, key=lambda name: (name != "nano", int("".join(filter(str.isdigit, name[:4])) or 0), name))


def load(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A configuration from a preset's name or a YAML file, then `section.key=value` overrides.

    A file may start from a preset with a top-level `preset: NAME`. Raises ConfigError.
    """
    values, origin = _read(source)
    for override in overrides:
        _apply(values, override)
        origin = f"{origin.removesuffix(' with --set')} with --set"
    return validate(values, origin)


def validate(values: Mapping[str, Any], source: str) -> Config:
    """A configuration from plain values. Raises ConfigError naming `source`, key, value and what is allowed."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, source)) from None


def _read(source: str | Path) -> tuple[dict[str, Any], str]:
    if isinstance(source, str) and source in preset_names():
        return _read_preset(source), f"preset {source}"
    path = Path(source)
    if path.suffix not in {".yaml", ".yml"} and not path.exists():
        raise ConfigError(f"{source!r} is neither a preset ({', '.join(preset_names())}) nor a YAML file")
    values = read_mapping(path)
    base = values.pop("preset", None)
    if base is None:
        return values, str(path)
    if base not in preset_names():
        raise ConfigError(f"{path}: preset: {base!r} is not one of {', '.join(preset_names())}")
    return _merge(_read_preset(base), values), str(path)


def _read_preset(name: str) -> dict[str, Any]:
    text = (resources.files("tinyllm_ray.model") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = parse_yaml(text, f"preset {name}")
    return values


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name or "." in name:
        raise ConfigError(f"--set {override!r} is not section.key=value, like --set optimizer.peak_learning_rate=1e-3")
    block = values.setdefault(section, {})
    if not isinstance(block, dict):
        raise ConfigError(f"--set {override!r}: {section} is not a section")
    block[name] = parse_yaml(text, f"--set {key.strip()}")
