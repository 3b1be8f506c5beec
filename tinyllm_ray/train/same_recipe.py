"""Whether a run may go on from a checkpoint: the recipe and the token cache have to be those it was written under."""

import json
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
    different = _differences(checkpoint.config, config)
    if checkpoint.manifest.cache_identity != cache_identity:
        different.append(f"token cache {checkpoint.manifest.cache_identity}, asked {cache_identity}")
    _refuse(checkpoint.path, different)


def refuse_other_run(run: Path, config: Config, cache_identity: str) -> None:
    """As `refuse_other_recipe`, by what a run without checkpoints left in its folder."""
    if not (run / "config.yaml").exists():
        return
    different = _differences(load(run / "config.yaml"), config)
    before = read_result(run).get("cache_identity", cache_identity)
    if before != cache_identity:
        different.append(f"token cache {before}, asked {cache_identity}")
    _refuse(run, different)


def _differences(stored: Config, asked: Config) -> list[str]:
    before, now = _settings(stored.recipe), _settings(asked.recipe)
    return [
        f"{key} {_shown(before, key)}, asked {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if (key in before, before.get(key)) != (key in now, now.get(key))
    ]


def _refuse(place: Path, different: list[str]) -> None:
    if different:
        raise ConfigError(
            f"{place}: was written by another recipe: {'; '.join(different)}; "
            "ask for the stored values, or start a run of its own"
        )


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """By dotted key; a section that a recipe does without has none."""
    return {f"{section}.{key}": value for section, values in recipe.items() for key, value in (values or {}).items()}


def _shown(settings: dict[str, Any], key: str) -> str:
    return _shortened(json.dumps(settings[key])) if key in settings else "nothing"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
