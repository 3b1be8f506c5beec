"""Whether a run may go on from a checkpoint: the recipe and the token cache have to be those it was written under."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint
from tinyllm_ray.train.folder import read_result

_SHOWN_CHARACTERS = 60


def refuse_other_recipe(checkpoint: Checkpoint, config: Config, cache_identity: str) -> None:
    """Raises ConfigError naming every setting of the recipe in which `config` differs, and a different token cache.

    How a recipe is executed, what it leaves, where its cache lies and where a run is cut are free.
    """
    different = list(differences(checkpoint.config.recipe, config.recipe))
    if checkpoint.manifest.cache_identity != cache_identity:
        different.append(f"token cache {checkpoint.manifest.cache_identity}, asked {cache_identity}")
    _refuse(checkpoint.path, different)


def refuse_other_run(run: Path, config: Config, cache_identity: str) -> None:
    """As `refuse_other_recipe`, by what a run without checkpoints left in its folder."""
    if not (run / "config.yaml").exists():
        return
    different = list(differences(load(run / "config.yaml").recipe, config.recipe))
    before = read_result(run).get("cache_identity", cache_identity)
    if before != cache_identity:
        different.append(f"token cache {before}, asked {cache_identity}")
    _refuse(run, different)


def _refuse(place: Path, different: list[str]) -> None:
    if different:
        raise ConfigError(
            f"{place}: was written by another recipe: {'; '.join(different)}; "
            "ask for the stored values, or start a run of its own"
        )


def differences(stored: dict[str, Any], asked: dict[str, Any], above: str = "") -> Iterator[str]:
    """The settings in which two recipes differ, by dotted key, with both values; what is absent is as null.

    Lists of as many sections, as packed models have one each, are compared section by section.
    """
    for name in sorted(stored.keys() | asked.keys()):
        there, here = stored.get(name), asked.get(name)
        if there == here:
            continue
        if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
            there, here = (_numbered(values) for values in (there, here))
        if isinstance(there or here, dict) and isinstance(here or there, dict):
            yield from differences(there or {}, here or {}, f"{above}{name}.")
        else:
            yield f"{above}{name} {_shown(there)}, asked {_shown(here)}"


def _numbered(values: list[Any]) -> list[Any] | dict[str, Any]:
    """A list of sections as one section with a section under each number."""
    return dict(zip(map(str, range(len(values))), values, strict=True)) if isinstance(values[0], dict) else values


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
