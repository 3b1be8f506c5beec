"""What earlier sessions of a study have used of its budget.

Standard library only: the supervisor's command line imports this module.
"""

import json
import select
import subprocess
import sys
from pathlib import Path

from tinyllm_ray.clock import format_duration
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune.processes import drop_helper, start_helper

SUMMARY = "summary.json"

_ANSWER_SECONDS = 10.0
"""For the folder's file system to give the last report; before it nobody knows how much of the budget is left."""


def spent_seconds(out: Path) -> float:
    """Seconds of the budget used so far, as the last report in `out` says; 0 where there is none."""
    try:
        text = _read(out / SUMMARY)
        return 0.0 if text is None else float(json.loads(text)["elapsed_seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{out / SUMMARY}: cannot be read ({error}); it says how much of the budget is used"
        ) from None


def _read(path: Path) -> str | None:
    """The file's text, None where there is no file; by a process of its own, since a read may hang beyond any signal.

    Raises OSError, a TimeoutError where no answer comes.
    """
    helper = start_helper(tell_text, str(path.absolute()), stderr=subprocess.PIPE)
    assert helper.stderr is not None
    try:
        if not select.select([helper.stderr], [], [], _ANSWER_SECONDS)[0]:
            raise TimeoutError("its file system does not answer")
        answer = json.loads(helper.stderr.read())
    finally:
        drop_helper(helper)
    if "problem" in answer:
        raise OSError(answer["problem"])
    text: str | None = answer["text"]
    return text


def tell_text(path: str) -> None:
    """The helper: say on standard error, as one JSON object, what the file holds or why it cannot be read."""
    try:
        answer: dict[str, str | None] = {"text": Path(path).read_bytes().decode(errors="replace")}
    except FileNotFoundError:
        answer = {"text": None}
    except OSError as error:
        answer = {"problem": str(error)}
    json.dump(answer, sys.stderr)


def seconds_left(total_seconds: float, out: Path, resume: bool) -> float:
    """Seconds of the budget that are left for a session. Raises ConfigError where a resumed study has used them up."""
    spent = spent_seconds(out) if resume else 0.0
    if spent >= total_seconds:
        raise ConfigError(
            f"--resume: {format_duration(spent)} of the budget of {format_duration(total_seconds)} are spent; "
            "give a larger --budget"
        )
    return total_seconds - spent
