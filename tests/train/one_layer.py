"""The tiny configuration with a single layer, for tests of what every layer has alike."""

from collections.abc import Callable
from typing import Any

from tinyllm_ray.config import Config


def one_layer(tiny: Callable[..., Config]) -> Callable[..., Config]:
    """`tiny`, whose model has one layer where nothing else is asked for."""

    def make(**sections: dict[str, Any]) -> Config:
        return tiny(**sections | {"model": {"layers": 1} | sections.get("model", {})})

    return make
