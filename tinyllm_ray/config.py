"""What is trained (the recipe) and how it is run (the execution), as validated models.

A configuration has the sections model, data, optimizer, training, evaluation and packing (together the recipe, which
has an identity), execution and evaluation_execution (which may change speed and nothing else), output, and tuned where
a study selected it. It is read from a preset, a YAML file that may name a preset to start from, and
`--set dotted.key=value`.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import (
    CUDA_GRAPH_MODES,
    EvaluationExecutionConfig,
    ExecutionConfig,
    PackedBackward,
    default_micro_batch_size,
    default_packed_backward,
)
from tinyllm_ray.promise import Promise
from tinyllm_ray.sections import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    PackingConfig,
    Section,
    TrainingConfig,
)
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import dump_yaml, parse_yaml, read_mapping


class Config(Section):
    """A complete configuration.

    >>> from tinyllm_ray.config import load
    >>> config = load("20m-32k")
    >>> config.model.parameters, config.targets_per_update, config.accumulation
    (20403520, 32768, 1)
    >>> faster = config.with_execution({"micro_batch_size": 8, "update": "graph"})
    >>> faster.accumulation, faster.recipe_identity == config.recipe_identity
    (4, True)
    """

    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    packing: PackingConfig = PackingConfig()
    execution: ExecutionConfig = ExecutionConfig()
    evaluation_execution: EvaluationExecutionConfig = EvaluationExecutionConfig()
    output: OutputConfig = OutputConfig()
    tuned: Promise | None = None
    """What the study that selected this execution promises of it."""

    @model_serializer(mode="wrap")
    def _leave_out_no_promise(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if name != "tuned" or value is not None}

    @model_validator(mode="after")
    def _check_division(self) -> Self:
        tokens, context = self.training.tokens_per_update, self.model.context
        if tokens % context:
            raise ValueError(f"training.tokens_per_update {tokens} must be a multiple of model.context {context}")
        models = self.packing.models
        if self.packing.mixed and self.rows_per_update % models:
            raise ValueError(
                f"packing.models {models} must divide the {self.rows_per_update} rows of an update "
                f"(training.tokens_per_update {tokens} / model.context {context}), which they share"
            )
        micro = self.execution.micro_batch_size
        if micro is not None and self.rows_per_model % micro:
            shared = f" / packing.models {models}" if self.packing.mixed else ""
            raise ValueError(
                f"execution.micro_batch_size {micro} must divide the {self.rows_per_model} rows of {self.what_has_rows}"
                f" (training.tokens_per_update {tokens} / model.context {context}{shared})"
            )
        return self

    @model_validator(mode="after")
    def _check_packed_execution(self) -> Self:
        execution, models = self.execution, self.packing.models
        if models == 1:
            return self
        if execution.compile_mode in CUDA_GRAPH_MODES:
            raise ValueError(
                f"execution.compile_mode {execution.compile_mode} replays CUDA graphs, which packed models do not; "
                "take default or max-autotune-no-cudagraphs"
            )
        if execution.optimizer_kernel == "triton":
            raise ValueError(
                f"execution.optimizer_kernel triton is for one model, and packing.models is {models}; take torch: "
                "packed models have a kernel of their own"
            )
        if (execution.update, self.packed_backward) == ("graph", "processes"):
            raise ValueError(
                "execution.update graph captures an update within one process; with packed_backward processes take "
                "update eager or compiled, or take packed_backward at_once or one_by_one"
            )
        return self

    @property
    def rows_per_update(self) -> int:
        """Rows that an update takes from an order of them: mixed models share one, others have one each."""
        return self.training.tokens_per_update // self.model.context

    @property
    def rows_per_model(self) -> int:
        """Rows of an update that a model trains on."""
        return self.rows_per_update // self.packing.models if self.packing.mixed else self.rows_per_update

    @property
    def batch_rows(self) -> int:
        """Rows of an update, all models'."""
        return self.rows_per_model * self.packing.models

    @property
    def targets_per_update(self) -> int:
        """Targets of an update, all models'."""
        return self.batch_rows * self.model.context

    @property
    def what_has_rows(self) -> str:
        """What micro-batches divide, for people."""
        return "an update" if self.packing.models == 1 else "a model in an update"

    @property
    def micro_batch_size(self) -> int:
        """Rows of a model in a forward and backward pass, the default settled."""
        chosen = self.execution.micro_batch_size
        return chosen or default_micro_batch_size(self.rows_per_model)

    @property
    def accumulation(self) -> int:
        """Micro-batches an update."""
        return self.rows_per_model // self.micro_batch_size

    @property
    def packed_backward(self) -> PackedBackward:
        """How packed models pass backward, the default settled."""
        return self.execution.packed_backward or default_packed_backward(self.micro_batch_size)

    @property
    def token_budget(self) -> Fraction:
        """Targets of the whole recipe; exact, since updates are rounded from it. Of each model where none are mixed.

        It goes by one model's parameters: what mixed models make together is one model.
        """
        training = self.training
        if training.token_budget is not None:
            return Fraction(training.token_budget)
        return decimal(training.tokens_per_parameter) * self.model.parameters

    @property
    def recipe(self) -> dict[str, Any]:
        """What is learned, as plain values: neither where the cache lies nor where a run is cut belongs to it.

        One model's recipe is the same whether or not there are packs.
        """
        sections = {"model", "data", "optimizer", "training", "evaluation"}
        recipe = self.model_dump(mode="json", include=sections | ({"packing"} if self.packing.models > 1 else set()))
        del recipe["data"]["cache"], recipe["training"]["max_updates"]
        return recipe

    @property
    def recipe_identity(self) -> str:
        """SHA-256 over the recipe."""
        return identity(self.recipe)

    @property
    def workload(self) -> dict[str, Any]:
        """All that an update's time depends on beside the machine, as plain values.

        Rates, seeds and lengths are left out: what a study found out counts for every training of a sweep over them.
        """
        values = self.model_dump(mode="json", include={"model", "packing", "execution"})
        values["packing"].pop("variants")
        return values | {"tokens_per_update": self.training.tokens_per_update}

    @property
    def workload_identity(self) -> str:
        """SHA-256 over the workload."""
        return identity(self.workload)

    def with_execution(self, settings: Mapping[str, Any]) -> "Config":
        """The same recipe under other execution settings, promised by nobody; those not named stay."""
        values = self.model_dump(mode="json", exclude={"tuned"})
        values["execution"] |= settings
        return validate(values, "execution")

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


def decimal(number: float) -> Fraction:
    """The number that was written: 0.1 is a tenth, not the double beside it."""
    return Fraction(str(number))


def identity(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def preset_names() -> list[str]:
    """Names of the presets that ship with the package, smallest model first."""
    folder = resources.files("tinyllm_ray.model") / "presets"
    names = [entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted(names, key=lambda name: ([int(size) for size in re.findall(r"(\d+)m", name)], name))


def load(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A configuration from a preset's name or a YAML file, then `section.key=value` overrides.

    A file may start from a preset with a top-level `preset: NAME`. Raises ConfigError.

    >>> from pathlib import Path
    >>> from tinyllm_ray.config import load
    >>> _ = Path("mine.yaml").write_text("preset: nano\\noptimizer: {weight_decay: 0.05}\\n")
    >>> load("mine.yaml", ["training.seed=7"]).optimizer.weight_decay
    0.05
    >>> load("nano", ["training.sed=7"])
    Traceback (most recent call last):
    tinyllm_ray.errors.ConfigError: preset nano with --set: training.sed: there is no such key; did you mean ...
    """
    return override(*_read(source), overrides)


def override(values: Mapping[str, Any], source: str, overrides: Iterable[str]) -> Config:
    """A configuration from plain values, named `source` in messages, then `section.key=value` overrides.

    Raises ConfigError.
    """
    changed = copy.deepcopy(dict(values))
    for setting in overrides:
        _apply(changed, setting)
        source = f"{source.removesuffix(' with --set')} with --set"
    return validate(changed, source)


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
    if path.is_dir() or (path.suffix not in {".yaml", ".yml"} and not path.exists()):
        raise ConfigError(f"{str(source)!r} is neither a preset ({', '.join(preset_names())}) nor a YAML file")
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


def _apply(values: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name or "." in name:
        raise ConfigError(f"--set {setting!r} is not section.key=value, like --set optimizer.peak_learning_rate=1e-3")
    block = values.setdefault(section, {})
    if not isinstance(block, dict):
        raise ConfigError(f"--set {setting!r}: {section} is not a section")
    block[name] = parse_yaml(text, f"--set {key.strip()}")
