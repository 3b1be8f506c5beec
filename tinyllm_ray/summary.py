"""A study's summary as its folder holds it: read strictly, or as far as it can be read.

Standard library only: the supervisor's command line and a job's launcher import this module.
"""

import json
from pathlib import Path
from typing import Any

from tinyllm_ray.errors import TinyllmRayError

SUMMARY = "summary.json"

_FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("budget_seconds", "elapsed_seconds", "parameters", "targets_per_update", "timestamp"), (int, float)
    ),
    **dict.fromkeys(("study", "verdict", "ended"), str),
    **dict.fromkeys(("baseline", "eager", "selected", "speedup", "verification", "objective", "account"), dict),
    **dict.fromkeys(("candidates", "winners", "devices", "ties", "sessions", "studies"), list),
}
"""Of what is read of a summary, where it is there and not null."""
_WITH_CANDIDATE = ("baseline", "eager", "selected", "candidates", "winners")
"""Objects, or lists of them, that name one."""
_SHOWN = 60
"""Characters of a value in an error."""


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
    for key, form in _FORMS.items():
        if not _is_well_formed(key, form, summary.get(key)):
            shown = json.dumps(summary[key])
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise TinyllmRayError(
                f"{out / SUMMARY} is damaged: {key}: {shown}; delete the file, the records are enough"
            )
    return summary


def _is_well_formed(key: str, form: type | tuple[type, ...], value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, form) or isinstance(value, bool):
        return False
    parts: list[Any] = value if isinstance(value, list) else [value]
    if key in _WITH_CANDIDATE:
        return all(isinstance(one, dict) and isinstance(one.get("candidate"), str) for one in parts)
    return form is not list or all(isinstance(one, str if key == "ties" else dict) for one in parts)


def find_summary(out: Path) -> dict[str, Any]:
    """The same for who can do without: empty, too, where it cannot be read."""
    try:
        return read_summary(out)
    except TinyllmRayError:
        return {}
