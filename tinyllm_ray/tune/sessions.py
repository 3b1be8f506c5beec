"""What every session of a study has used of its budget: a file a session in OUT/sessions, killed ones included.

The journal's helper keeps a session's file, because it outlives a supervisor that is killed and sees when that was; one
that is killed with it is known to its last sign of life. Standard library only: the supervisor imports this module.
"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tinyllm_ray import journal

SESSIONS: Final = "sessions"
SIGN_OF_LIFE_SECONDS: Final = 5.0
"""Between two entries of a running session: what a power failure leaves uncounted."""


def write_session(out: Path, session: str, began: float, until: float, ended: bool) -> None:
    """Note that `session` has lasted from `began` to `until` on time.monotonic, and whether it closed by itself.

    Raises OSError, where OUT is gone for one: it is not made again.
    """
    moment = time.time() - (time.monotonic() - began)
    entry = {"session": session, "began": moment, "seconds": until - began, "ended": ended}
    (out / SESSIONS).mkdir(exist_ok=True)
    journal.write_atomically(out / SESSIONS / f"{session}.json", json.dumps(entry).encode() + b"\n")


def read_sessions(out: Path) -> list[dict[str, Any]]:
    """The sessions so far, oldest first: `session`, `began` (Unix time), `seconds`, and `ended`, false if killed.

    Raises OSError, and ValueError naming a file that is damaged.
    """
    found = []
    for path in (out / SESSIONS).glob("*.json"):
        try:
            entry = json.loads(path.read_bytes())
            found.append({"session": path.stem, "began": float(entry["began"]), "seconds": float(entry["seconds"])})
            found[-1]["ended"] = bool(entry["ended"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{SESSIONS}/{path.name} is damaged: {error!r}") from None
    return sorted(found, key=lambda entry: entry["began"])


def with_reported(sessions: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sessions with all seconds that the study has used, which its last summary may know better.

    A machine that lost its power may have written its report after its last sign of life, and a session that was killed
    in its first moments has no file yet. Raises KeyError, TypeError and ValueError where `summary` is no summary.
    """
    found = {entry["session"]: dict(entry) for entry in sessions}
    for reported in summary.get("sessions", ()):
        own = {name: reported[name] for name in ("session", "began", "seconds", "ended")}
        known = found.setdefault(own["session"], own)
        known["seconds"] = max(known["seconds"], float(own["seconds"]))
    beyond = float(summary["elapsed_seconds"]) - sum(entry["seconds"] for entry in found.values())
    if not found and beyond > 0:  # a study that an earlier program began
        return [{"session": None, "began": None, "seconds": beyond, "ended": False}]
    return sorted(found.values(), key=lambda entry: entry["began"] or 0.0)


def with_trials(
    sessions: Iterable[Mapping[str, Any]], trials: Iterable[tuple[float, float | None]]
) -> list[dict[str, Any]]:
    """The sessions with their number of recorded trials and those trials' seconds, for the summary.

    `trials` are Unix time of begin and seconds of each; one belongs to the last session that began before it.
    """
    found = [{**entry, "trials": 0, "trial_seconds": 0.0} for entry in sessions]
    for began, seconds in trials:
        before = [entry for entry in found if entry["began"] is None or entry["began"] <= began]
        if found:
            owner = before[-1] if before else found[0]
            owner["trials"] += 1
            owner["trial_seconds"] += seconds or 0.0
    return found
