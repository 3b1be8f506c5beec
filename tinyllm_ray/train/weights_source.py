"""Weights to evaluate or export, wherever they lie: in a run, a checkpoint, an imported folder, a lone file."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.checkpoints import find_checkpoint
from tinyllm_ray.train.manifest import MANIFEST, WEIGHTS
from tinyllm_ray.train.parts import WORKERS
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import read_mapping


class WeightsSource(NamedTuple):
    """Where weights lie, and what is known about them."""

    weights: Path
    """A safetensors file under our names."""
    configuration: dict[str, Any]
    """The configuration they were made with, or its section `model`, or nothing, as plain values."""
    origin: str
    """The configuration's place, for messages."""
    step: int | None = None
    cache_identity: str | None = None

    @property
    def model(self) -> ModelConfig:
        """Raises ConfigError where the configuration has no valid section `model`."""
        if not self.configuration:
            raise ConfigError(
                f"{self.origin}: this file knows no model; take a run's folder, a checkpoint's, or an import"
            )
        try:
            return ModelConfig.model_validate(self.configuration.get("model"))
        except ValidationError as error:
            raise ConfigError(explain(error, ModelConfig, f"{self.origin}: model")) from None


def open_weights(source: Path) -> WeightsSource:
    """The weights of a run's folder (its newest intact checkpoint), of a checkpoint's, of a folder with config.yaml and
    model.safetensors, or of a `.safetensors` file.

    Of packed models that are mixed a run or checkpoint stands for their average; of one of them its folder in the
    checkpoint, `step-00000100/workers/03`. Raises ConfigError where there are none, or none intact, or several.
    """
    if source.is_file():
        return WeightsSource(source, {}, str(source))
    imported = (source / WEIGHTS).is_file() and (source / "config.yaml").is_file()
    if imported and not (source / "checkpoints").is_dir():
        return WeightsSource(source / WEIGHTS, read_mapping(source / "config.yaml"), str(source / "config.yaml"))
    folder, worker = _split(source)
    found = find_checkpoint(folder)
    manifest = found.manifest
    return WeightsSource(
        found.weights_path(worker),
        manifest.config,
        str(found.path),
        step=manifest.step,
        cache_identity=manifest.cache_identity,
    )


def _split(source: Path) -> tuple[Path, int | None]:
    """The folder to find a checkpoint in, and the worker where `source` is one's folder."""
    checkpoint = source.parent.parent
    if source.parent.name == WORKERS and source.name.isdecimal() and (checkpoint / MANIFEST).exists():
        return checkpoint, int(source.name)
    return source, None
