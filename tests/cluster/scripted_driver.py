"""A driver that asks for given candidates in turn, in place of a study."""

from collections.abc import Mapping, Sequence
from typing import Any

from command_line import TINY_RECIPE

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.yamlfile import parse_yaml


class ScriptedDriver:
    """Its subclasses say what becomes of what they hear."""

    def __init__(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self.waiting = list(requests)

    @property
    def finished(self) -> bool:
        return not self.waiting

    def ask(self) -> Mapping[str, Any] | None:
        return self.waiting.pop(0) if self.waiting else None


def tiny_request(
    number: int, execution: Mapping[str, Any], protocol: Mapping[str, Any], cache: TokenCache | None
) -> dict[str, Any]:
    """The tiny recipe as candidate c<number>, on synthetic data where there is no cache."""
    config = Config.model_validate(parse_yaml(TINY_RECIPE, "tiny")).with_execution({"cpu_threads": 1, **execution})
    return {
        "study": "script",
        "candidate": f"c{number}",
        "label": f"candidate {number}",
        "config": config.model_dump(mode="json"),
        "protocol": {"data_mode": "real" if cache else "synthetic", **protocol},
        "cache": str(cache.folder) if cache else None,
        "cache_identity": cache.identity if cache else None,
        "configuration": None,
        "limit_seconds": 100.0,
    }
