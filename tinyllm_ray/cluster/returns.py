"""A job that Slurm runs again: the command goes on where its last run stopped, within what is left of the budget.

Slurm brings a job back after preemption, `scontrol requeue` or the loss of its first node, where it was submitted with
`--requeue`; the launcher asks for it itself when the allocation ends before the budget does. Standard library only:
the launcher imports this module.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm_ray.allocation import margin_seconds
from tinyllm_ray.cluster.jobs import ask_patiently, own_name
from tinyllm_ray.cluster.nodes import job_field
from tinyllm_ray.command import note
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, EXIT_SIGTERM, ConfigError
from tinyllm_ray.summary import find_summary

LEAST_REST_SECONDS = 60.0
"""Of a budget; with less a study is not worth going on with, as its start takes 5 to 12 s and a candidate 10 s."""
_DEFINITIONS, _SELECTED = ("study.yaml", "presets.yaml"), "selected.yaml"
"""What the folder of a study holds, or of several that share a budget, once there is something to go on with."""
_CUT = (None, "the budget's end", "SIGTERM", "SIGINT")
"""How a study's summary says that it did not end by itself; None is that of one that was killed."""
NODES_LOST = "nodes lost"
"""How the reason of a study begins that ended as no node was left for a trial."""


def may_return(job: str) -> bool:
    """Whether Slurm may run the job again, from `scontrol show job`."""
    return job_field(job, "Requeue") == "1"


def runs_before(environment: Mapping[str, str]) -> int:
    """How often this job has run already."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def continued(words: Sequence[str], number: int, before: int) -> list[str]:
    """The command as a job that may come back gives it, `before` runs of it having been: same OUT, and on from there.

    A study without `--out` gets one with the job's number, as the time in the default one changes from run to run.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if words[:1] == ["train"] and _has_no_action(words) and before and not _is_given(words, "--resume"):
        return [*words, "--resume"]
    if not is_study(words):
        return words
    if study_folder(words) is None:
        words += ["--out", f"studies/job-{number}"]
    folder = study_folder(words)
    begun = folder is not None and any((folder / name).exists() for name in _DEFINITIONS)
    if before and begun and not _is_given(words, "--resume"):
        words.append("--resume")
    return words


def is_study(words: Sequence[str]) -> bool:
    """Whether a command studies, and does not, say, make a report anew."""
    return words[:1] == ["tune"] and _has_no_action(words)


def study_folder(words: Sequence[str]) -> Path | None:
    """The folder that a command names with `--out`; None where it names none."""
    named = option_value(words, "--out")
    return None if named is None else Path(named)


def option_value(words: Sequence[str], option: str) -> str | None:
    """What a command gives an option, last; None where it does not."""
    found = None
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"{option}="):
            found = word.removeprefix(f"{option}=")
    return found


def settled_status(folder: Path) -> int | None:
    """The exit status of a study that has nothing left to do in another run; None where it has, or cannot be read."""
    summary = find_summary(folder)
    if not summary or _is_unfinished(summary):
        return None
    answered = (folder / _SELECTED).exists() or any(one.get("selected") for one in _parts(summary))
    return EXIT_DONE if answered else EXIT_NO_RESULT


def has_to_return(words: Sequence[str], status: int, received: Sequence[int], left: float | None) -> bool:
    """Whether a command was cut by the allocation's end, and has more to do; `left` is what the allocation has left.

    A job that got any other signal than Slurm's warning is being ended, or run again, by someone else. A study that
    has left nothing would come back for ever; one that ended for want of budget gains nothing by another allocation.
    """
    if any(number != signal.SIGUSR1 for number in received):
        return False
    folder = study_folder(words) if is_study(words) else None
    if folder is None:
        return bool(received) and status == EXIT_SIGTERM
    summary = find_summary(folder)
    if status not in (EXIT_DONE, EXIT_NO_RESULT, EXIT_SIGTERM) or not summary or not _is_unfinished(summary):
        return False
    if received or str(summary["ended"]).startswith(NODES_LOST):
        return True
    return left is not None and _rest(summary) - max(0.0, left - margin_seconds(left)) >= LEAST_REST_SECONDS


def requeue(environment: Mapping[str, str]) -> None:
    """Have Slurm run this job again; says so where Slurm refuses."""
    try:
        ask_patiently("scontrol", "requeue", own_name(environment))
    except ConfigError as error:
        note(f"cluster: Slurm does not take the job back ({error}); submit it again, with --resume", sys.stderr)


def _is_unfinished(summary: Mapping[str, Any]) -> bool:
    short = bool(summary.get("budget_exhausted")) or any(one.get("state") == "short" for one in _parts(summary))
    ended = summary.get("ended")
    cut = ended in _CUT or short or str(ended).startswith(NODES_LOST)
    return cut and _rest(summary) >= LEAST_REST_SECONDS


def _parts(summary: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The studies that share a budget; none of a summary of one."""
    found: Sequence[Mapping[str, Any]] = summary.get("studies", ())
    return found


def _rest(summary: Mapping[str, Any]) -> float:
    """Seconds of the budget."""
    return float(summary.get("budget_seconds", 0.0) - summary.get("elapsed_seconds", 0.0))


def _has_no_action(words: Sequence[str]) -> bool:
    return len(words) < 2 or words[1].startswith("-")


def _is_given(words: Sequence[str], option: str) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in words)
