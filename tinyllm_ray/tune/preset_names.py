"""The recipes that share a budget, as the command line names them, and their folders.

Standard library only: the supervisor's command line imports this module.
"""

from collections.abc import Sequence
from pathlib import Path

from tinyllm_ray.errors import ConfigError


def preset_list(text: str | None) -> list[str]:
    """The names in `20m,50m`; empty where several were not asked for. Raises ConfigError for a name that is missing."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"--presets: {text!r} leaves a name out; write them like 20m,50m,90m")
    return names


def folder_name(preset: str) -> str:
    """Of a preset by name, or of a recipe by its YAML file."""
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def study_folders(out: Path, presets: Sequence[str]) -> list[Path]:
    """The studies' folders: OUT itself, or those in it where several share a budget."""
    return [out / folder_name(preset) for preset in presets] or [out]
