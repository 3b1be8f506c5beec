"""A study's summary as its folder holds it: read strictly, or as far as it can be read.

Standard library only: the supervisor's command line and a job's launcher import this module.
"""

import json
from pathlib import Path
from typing import Any

from tinyllm_ray.errors import TinyllmRayError

SUMMARY = "summary.json"


def read_summary(out: Path) -> dict[str, Any]:
    """The summary of the study in `out`, empty where there is none.

    Raises TinyllmRayError where it is damaged or cannot be read.
    """
    try:
        summary = json.loads((out / SUMMARY).read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TinyllmRayError(f"{out / SUMMARY} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TinyllmRayError(f"{out / SUMMARY} is damaged: {error}") from None
    if not isinstance(summary, dict):
        raise TinyllmRayError(f"{out / SUMMARY} is damaged: it holds no JSON object")
    return summary


def find_summary(out: Path) -> dict[str, Any]:
    """The same for who can do without: empty, too, where it cannot be read."""
    try:
        return read_summary(out)
    except TinyllmRayError:
        return {}
