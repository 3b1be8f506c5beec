"""A small study for tests on a local Slurm, and what its folder says while it runs."""

import json
from typing import Any

from command_line import TINY_RECIPE
from local_slurm import LocalSlurm

from tinyllm_ray.records import TrialRecord, read_records

SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8], sdpa_backend: [auto, math]}
protocol: {warmup_updates: 1, windows: 2, updates_per_window: 30}
"""
STUDY = ("--config", "recipe.yaml", "--space", "space.yaml", "--objective", "throughput", "--out", "study")


def prepare(slurm: LocalSlurm) -> None:
    (slurm.work / "recipe.yaml").write_text(TINY_RECIPE)
    (slurm.work / "space.yaml").write_text(SPACE)


def records(slurm: LocalSlurm) -> list[TrialRecord]:
    """What is in OUT by now."""
    return read_records(slurm.work / "study" / "trials.jsonl")


def summary(slurm: LocalSlurm) -> dict[str, Any]:
    """OUT's summary; nothing before there is one."""
    try:
        found: dict[str, Any] = json.loads((slurm.work / "study" / "summary.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def running(slurm: LocalSlurm) -> list[str]:
    """The candidates in flight."""
    return [row["candidate"] for row in summary(slurm).get("candidates", []) if row["state"] == "running"]


def wait_for_a_candidate_in_flight(slurm: LocalSlurm) -> None:
    """Until one candidate's record is in OUT, and another one has begun."""
    slurm.wait(lambda: bool(records(slurm)) and bool(running(slurm)))
