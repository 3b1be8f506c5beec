"""What earlier sessions of a study have used of its budget.

Standard library only: the supervisor's command line imports this module.
"""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import format_duration
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.summary import SUMMARY
from tinyllm_ray.tune.processes import drop_helper, start_helper
from tinyllm_ray.tune.sessions import read_sessions, with_reported

_ANSWER_SECONDS = 10.0
"""For the folder's file system to give the last report; before it nobody knows how much of the budget is left."""


def sessions_so_far(out: Path) -> list[dict[str, Any]]:
    """What each session of the study in `out` has used, as `sessions.with_reported` has them. Raises ConfigError."""
    try:
        answer = _ask(out)
        text = answer["summary"]
        return with_reported(answer["sessions"], {"elapsed_seconds": 0.0} if text is None else json.loads(text))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{out / SUMMARY}: cannot be read ({error}); it says how much of the budget is used"
        ) from None


def spent_seconds(out: Path) -> float:
    """Seconds of the budget used so far, those of killed sessions included; 0 where there is no study."""
    return float(sum(entry["seconds"] for entry in sessions_so_far(out)))


def _ask(out: Path) -> dict[str, Any]:
    """What the folder says, by a process of its own, since a read may hang beyond any signal.

    Raises OSError, a TimeoutError where no answer comes.
    """
    helper = start_helper(tell_used, str(out.absolute()), stderr=subprocess.PIPE)
    assert helper.stderr is not None
    try:
        if not select.select([helper.stderr], [], [], _ANSWER_SECONDS)[0]:
            raise TimeoutError("its file system does not answer")
        answer: dict[str, Any] = json.loads(helper.stderr.read())
    finally:
        drop_helper(helper)
    if "problem" in answer:
        raise OSError(answer["problem"])
    return answer


def tell_used(out: str) -> None:
    """The helper: say on standard error, as one JSON object, what the folder holds or why it cannot be read."""
    folder = Path(out)
    answer: dict[str, Any]
    try:
        answer = {"summary": _text_of(folder / SUMMARY), "sessions": read_sessions(folder)}
    except (OSError, ValueError) as error:
        answer = {"problem": str(error)}
    json.dump(answer, sys.stderr)


def _text_of(path: Path) -> str | None:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def seconds_left(total_seconds: float, out: Path, resume: bool) -> float:
    """Seconds of the budget that are left for a session. Raises ConfigError where a resumed study has used them up."""
    spent = spent_seconds(out) if resume else 0.0
    if spent >= total_seconds:
        raise ConfigError(
            f"--resume: {format_duration(spent)} of the budget of {format_duration(total_seconds)} are spent; "
            "give a larger --budget"
        )
    return total_seconds - spent
