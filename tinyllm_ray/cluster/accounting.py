"""What Slurm accounts of a job: every run of it, from the first source that knows one.

`sacct` with a data base has all; `sacct -c` (completion records in a file) has no devices and no energy; `scontrol`
knows the last run only, and forgets it minutes after its end (`MinJobAge`). Standard library only.
"""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tinyllm_ray.cluster.jobs import ask_slurm, of_job
from tinyllm_ray.cluster.nodes import job_field
from tinyllm_ray.errors import ConfigError

_COLUMNS = ("State", "ExitCode", "Start", "End", "NNodes", "AllocTRES", "ConsumedEnergyRaw")
_GPUS = re.compile(r"gres/gpu=(\d+)", re.ASCII)


@dataclass(frozen=True)
class JobRun:
    """One run of a job; None is what its source does not tell."""

    state: str
    """In Slurm's words: COMPLETED, TIMEOUT, PREEMPTED, NODE_FAIL, CANCELLED by 1000, ..."""
    exit_code: str | None
    """STATUS:SIGNAL of the batch script."""
    begin: float | None
    """Unix time, as is the end, which a running job does not have."""
    end: float | None
    nodes: int
    gpus: int | None
    joules: float | None


def job_runs(number: int, ask: Callable[..., str] = ask_slurm) -> tuple[list[JobRun], str]:
    """A job's runs, oldest first, and who told; nothing and `nobody` where Slurm knows no more of it."""
    table, columns = ("--noheader", "--parsable2", f"--jobs={number}"), ",".join(_COLUMNS)
    full = ("--allocations", "--duplicates", *table, f"--format={columns},JobIDRaw")
    sources: tuple[tuple[str, tuple[str, ...], Callable[[str], list[JobRun]]], ...] = (
        ("sacct", ("sacct", *full), lambda text: parse_rows(rows_of(number, text))),
        ("sacct -c", ("sacct", "--completion", *table, f"--format={columns}"), parse_rows),
        ("scontrol", ("scontrol", "show", "job", "--oneliner", str(number)), lambda text: parse_shown(number, text)),
    )
    for name, command, parse in sources:
        with contextlib.suppress(ConfigError):  # accounting is off, or the job forgotten
            if runs := parse(ask(*command)):
                return runs, name
    return [], "nobody"


def rows_of(number: int, text: str) -> str:
    """A job's rows of sacct's, whose last column is its number: for an array's it tells of all tasks."""
    rows = (line.rpartition("|") for line in text.splitlines())
    return "\n".join(row for row, _, raw in rows if raw == str(number))


def parse_rows(text: str) -> list[JobRun]:
    """Runs from sacct's `--parsable2` rows. A run that never began is none."""
    runs = []
    for line in text.splitlines():
        values = dict(zip(_COLUMNS, line.split("|"), strict=False))
        begin = _time(values.get("Start", ""))
        if begin is None or len(values) < len(_COLUMNS) or values["NNodes"] == "0":
            continue
        gpus = _GPUS.search(values["AllocTRES"])
        joules = _number(values["ConsumedEnergyRaw"])
        # Of a requeued run the completion file has the state that came after it.
        state = "REQUEUED" if values["State"] == "PENDING" else values["State"]
        told = values["AllocTRES"] != ""
        devices = int(gpus[1]) if gpus else 0 if told else None
        end = _time(values["End"])
        runs.append(JobRun(state, values["ExitCode"] or None, begin, end, int(values["NNodes"]), devices, joules))
    return runs


def resized_since(runs: Sequence[JobRun], began: float | None) -> list[JobRun]:
    """Runs of the completion file, which has one that handed nodes back begin at its end (22.05), begun when they did.

    `began` is when the job's launcher last did.
    """
    found: list[JobRun] = []
    for run in runs:
        lacking = run.state == "RESIZING" and run.begin == run.end
        if lacking and began is not None and began < (run.end or 0.0):
            found.append(replace(run, begin=began))
            began = run.end
        else:
            found.append(run)
    return found


def parse_shown(number: int, text: str) -> list[JobRun]:
    """The last run of a job from `scontrol show job --oneliner`."""
    text = of_job(number, text)
    begin = _time(job_field(text, "StartTime") or "")
    state = job_field(text, "JobState")
    if begin is None or state is None or state == "PENDING":
        return []
    end = None if state in ("RUNNING", "COMPLETING", "SUSPENDED") else _time(job_field(text, "EndTime") or "")
    gpus = _GPUS.search(job_field(text, "TRES") or "")
    nodes = int(_number((job_field(text, "NumNodes") or "1").partition("-")[0]) or 1)
    return [JobRun(state, job_field(text, "ExitCode"), begin, end, nodes, int(gpus[1]) if gpus else 0, None)]


def _time(text: str) -> float | None:
    """Unix time of what Slurm writes in this machine's zone; None for Unknown and None."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _number(text: str) -> float | None:
    """None where nothing is measured, which sacct writes as 0 or leaves out, or as a number beyond all measure."""
    with contextlib.suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) and 0 < value < 2**63 else None
    return None
