"""The tuner's public API: `Tuner`, `tune_presets`, `TuneResult`, `load_space`, `rerun`, `validate`.

Names are loaded when they are asked for: the command line's supervisor imports this package and must start at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyllm_ray.search.space import Space, load_space
    from tinyllm_ray.tune.again.command import rerun, validate
    from tinyllm_ray.tune.tuner import Tuner, TuneResult, tune_presets

__all__ = ["Space", "TuneResult", "Tuner", "load_space", "rerun", "tune_presets", "validate"]


def __getattr__(name: str) -> Any:
    if name in {"load_space", "Space"}:
        from tinyllm_ray.search import space

        return getattr(space, name)
    if name in {"Tuner", "TuneResult", "tune_presets"}:
        from tinyllm_ray.tune import tuner

        return getattr(tuner, name)
    if name in {"rerun", "validate"}:
        from tinyllm_ray.tune.again import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
