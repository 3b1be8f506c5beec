"""What earlier sessions of a study have used of its budget.

Standard library only: the supervisor's command line imports this module.
"""

import json
from pathlib import Path

from tinyllm_ray.clock import format_duration
from tinyllm_ray.errors import ConfigError

SUMMARY = "summary.json"


def spent_seconds(out: Path) -> float:
    """Seconds of the budget used so far, as the last report in `out` says; 0 where there is none."""
    try:
        return float(json.loads((out / SUMMARY).read_text())["elapsed_seconds"])
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{out / SUMMARY}: cannot be read ({error}); it says how much of the budget is used"
        ) from None


def seconds_left(total_seconds: float, out: Path, resume: bool) -> float:
    """Seconds of the budget that are left for a session. Raises ConfigError where a resumed study has used them up."""
    spent = spent_seconds(out) if resume else 0.0
    if spent >= total_seconds:
        raise ConfigError(
            f"--resume: {format_duration(spent)} of the budget of {format_duration(total_seconds)} are spent; "
            "give a larger --budget"
        )
    return total_seconds - spent
