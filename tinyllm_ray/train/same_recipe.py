"""Whether a run may go on from a checkpoint: the recipe and the token cache have to be those it was written under."""

import json
from typing import Any

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint

_SHOWN_CHARACTERS = 60


def refuse_other_recipe(checkpoint: Checkpoint, config: Config, cache_identity: str) -> None:
    """Raises ConfigError naming every setting of the recipe in which `config` differs, and a different token cache.

    How a recipe is executed, what it leaves, where its cache lies and where a run is cut are free.
    """
    stored, asked = _settings(checkpoint.config.recipe), _settings(config.recipe)
    different = [
        f"{key} {_shown(stored, key)}, asked {_shown(asked, key)}"
        for key in sorted(stored.keys() | asked.keys())
        if (key in stored, stored.get(key)) != (key in asked, asked.get(key))
    ]
    if checkpoint.manifest.cache_identity != cache_identity:
        different.append(f"token cache {checkpoint.manifest.cache_identity}, asked {cache_identity}")
    if different:
        raise ConfigError(
            f"{checkpoint.path}: was written by another recipe: {'; '.join(different)}; "
            "ask for the stored values, or start a run of its own"
        )


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in recipe.items() for key, value in values.items()}


def _shown(settings: dict[str, Any], key: str) -> str:
    return _shortened(json.dumps(settings[key])) if key in settings else "nothing"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
