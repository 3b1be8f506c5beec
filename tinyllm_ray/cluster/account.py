"""Where a job's GPU seconds went: the study's own records beside what Slurm accounts.

A trial holds one GPU from its request to its record; where a cluster has no GPUs, it holds a node, and node seconds
are counted. What the allocation had and no trial held is idle.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import format_duration
from tinyllm_ray.cluster.accounting import JobRun
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.summary import find_summary

PHASES = ("start", "compile", "warmup", "windows", "proof", "verify", "other")
"""`verify` is all of the trials that measure again, `other` what a trial's record has beside its phases: the wait for
its process, and its end."""
_RECORDS, _PRESETS = "trials.jsonl", "presets.yaml"


@dataclass(frozen=True)
class StudyUse:
    """What a study's folder says."""

    folder: Path
    records: Sequence[TrialRecord]
    summary: dict[str, Any]


@dataclass(frozen=True)
class GpuAccount:
    """Seconds of devices, by what they were for."""

    unit: str
    """`GPU` or `node`: what a trial holds."""
    devices: int
    phases: dict[str, float]
    allocated: float | None
    """Device seconds of the job's runs; None where nobody knows them."""
    idle: float | None
    idle_parts: dict[str, float]
    """Before the first trial of a run, between trials, and after the last one."""
    trial_joules: float | None
    """By the devices' counters, over all windows; None where they have none."""
    slurm_joules: float | None
    unmetered: int = 0
    """Runs that have ended and of which Slurm tells no energy: seen with 22.05 of those that were requeued."""


def read_study(folder: Path) -> StudyUse:
    """A study's records and summary, or those of all studies that share a budget in the folder.

    Raises ConfigError where it holds none.
    """
    own = [folder / _RECORDS]
    files = sorted(folder.glob(f"*/{_RECORDS}")) if (folder / _PRESETS).exists() else own
    if not files or not files[0].exists():
        raise ConfigError(f"{folder} holds no study's records ({_RECORDS} is missing); give a job's number or an OUT")
    records = [record for file in files for record in read_records(file)]
    # What all came to is the whole's to tell; of the cluster each study's own summary does.
    return StudyUse(folder, records, find_summary(files[0].parent) | find_summary(folder))


def jobs_of(records: Iterable[TrialRecord]) -> list[int]:
    """Numbers of the Slurm jobs that the trials ran in, in their order."""
    found = [record.environment.get("slurm", {}).get("SLURM_JOB_ID", "") for record in records]
    return list(dict.fromkeys(int(number) for number in found if str(number).isdecimal()))


def account_of(records: Sequence[TrialRecord], runs: Sequence[JobRun], devices: int, unit: str) -> GpuAccount:
    """The account of trials in these runs; a run that has not ended ends now.

    `devices` is what a run has of whose Slurm does not tell; a job that handed nodes back is several runs to it.
    """
    phases = phases_of(records)
    spans = [
        (run.begin, run.end or time.time(), (run.gpus or devices) if unit == "GPU" else run.nodes)
        for run in runs
        if run.begin is not None
    ]
    if not spans:
        return GpuAccount(unit, devices, phases, None, None, {}, _trial_joules(records), None)
    allocated = sum(count * (end - begin) for begin, end, count in spans)
    idle = allocated - sum(phases.values())
    joules = [run.joules for run in runs if run.joules is not None]
    return GpuAccount(
        unit,
        devices,
        phases,
        allocated,
        idle,
        _idle_parts(records, spans, idle),
        _trial_joules(records),
        sum(joules) if joules else None,
        sum(run.joules is None and run.end is not None for run in runs) if joules else 0,
    )


def phases_of(records: Iterable[TrialRecord]) -> dict[str, float]:
    """Device seconds by phase, all trials together."""
    phases = dict.fromkeys(PHASES, 0.0)
    for record in records:
        seconds = record.seconds
        if record.purpose == "verification":
            phases["verify"] += seconds.total or 0.0
            continue
        known = {name: getattr(seconds, name) or 0.0 for name in ("start", "compile", "warmup", "windows", "proof")}
        for name, value in known.items():
            phases[name] += value
        phases["other"] += max(0.0, (seconds.total or 0.0) - sum(known.values()))
    return phases


def lines(account: GpuAccount) -> list[str]:
    """The account as a table for people."""
    whole = account.allocated or sum(account.phases.values())
    rows = [(name, value) for name, value in account.phases.items() if value or name != "other"]
    if account.idle is not None:
        rows.append(("idle", max(0.0, account.idle)))
    said = [f"{name:<10}{value:>12,.0f} {account.unit} s{_share(value, whole):>9}" for name, value in rows]
    if account.idle_parts:
        said.append("idle: " + ", ".join(f"{value:,.0f} s {name}" for name, value in account.idle_parts.items()))
    if account.idle is not None and account.idle < 0:
        said.append(f"the trials used {-account.idle:,.0f} {account.unit} s more than Slurm accounts: it lacks a run")
    if account.allocated is not None:
        hours = account.allocated / 3600
        said.append(f"allocated {hours:,.2f} {account.unit} hours on {account.devices} {account.unit}(s)")
    if account.trial_joules is not None:
        said.append(f"energy by the windows alone: {account.trial_joules / 3.6e6:,.3f} kWh")
    if account.slurm_joules is not None:
        without = f", without {account.unmetered} run(s)" if account.unmetered else ""
        said.append(f"energy by Slurm's counters of whole nodes: {account.slurm_joules / 3.6e6:,.3f} kWh{without}")
    return said


def ending(runs: Sequence[JobRun], source: str) -> str:
    """How the allocation ended, on one line."""
    if not runs:
        return "Slurm knows no more of this job: what follows is the study's own record"
    words = []
    for run in runs:
        seconds = None if run.begin is None or run.end is None else run.end - run.begin
        code = f", exit {run.exit_code}" if run.exit_code else ""
        words.append(f"{run.state} after {format_duration(seconds)}{code}" if seconds is not None else run.state)
    return f"{'; then '.join(words)} (from {source})"


def _idle_parts(
    records: Sequence[TrialRecord], spans: Sequence[tuple[float, float, int]], idle: float
) -> dict[str, float]:
    """Every device waits for a run's first trial, and from its last one on."""
    before = after = 0.0
    for begin, end, count in spans:
        inside = [record for record in records if begin <= record.timestamp <= end]
        if not inside:
            before += count * (end - begin)
            continue
        before += count * (min(record.timestamp for record in inside) - begin)
        last = max(record.timestamp + (record.seconds.total or 0.0) for record in inside)
        after += count * max(0.0, end - last)
    between = max(0.0, idle - before - after)
    return {"before the first trial": before, "between trials": between, "after the last": after}


def _trial_joules(records: Iterable[TrialRecord]) -> float | None:
    found = [window.gpu.energy_joules for record in records for window in record.windows if window.gpu]
    known = [joules for joules in found if joules is not None]
    return sum(known) if known else None


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if whole else ""
