"""Small studies for tests on a local Slurm, and what their folder and their log say while they run."""

import json
import re
from collections import Counter
from typing import Any

from command_line import TINY_RECIPE
from local_slurm import LocalSlurm

from tinyllm_ray.records import Fate, TrialRecord, read_records

SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [1, 2, 4, 8]}
protocol: {warmup_updates: 1, windows: 2, updates_per_window: 40}
search_windows: by_count
"""
"""After the baseline its three others are begun at once where they fit: whatever it has shown, each may be faster."""
MANY = SPACE.replace("{micro_batch_size: [", "{sdpa_backend: [auto, flash, math], micro_batch_size: [")
_COMMON = ("--config", "recipe.yaml", "--objective", "throughput", "--out", "study")
STUDY = ("tune", "--budget", "1h", "--space", "space.yaml", *_COMMON)
MANY_STUDY = ("tune", "--budget", "1h", "--space", "many.yaml", *_COMMON)
_FATES = "|".join(fate.value for fate in Fate)
_TOLD = re.compile(rf"^\[\S+ left\] [^:]*: ({_FATES})\b", re.MULTILINE)


def prepare(slurm: LocalSlurm) -> None:
    for name, text in {"recipe.yaml": TINY_RECIPE, "space.yaml": SPACE, "many.yaml": MANY}.items():
        (slurm.work / name).write_text(text)


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


def told(slurm: LocalSlurm, job: int) -> Counter[Fate]:
    """How many candidates with each fate a job's log tells of."""
    return Counter(Fate(fate) for fate in _TOLD.findall(slurm.said(job)))


def wait_for_one_in_flight(slurm: LocalSlurm, job: int) -> None:
    """Until the baseline's record is in OUT, and another candidate has begun."""
    slurm.wait(lambda: bool(records(slurm)) and bool(running(slurm)), job)


def hold_in_flight(slurm: LocalSlurm, job: int, *nodes: str) -> dict[str, int]:
    """Hold a candidate on each node, begun after the baseline's record; returns what `hold` does."""
    slurm.wait(lambda: bool(records(slurm)) and len(_others(slurm)) == len(nodes), job)
    held = hold(slurm, job, *nodes)
    assert len(_others(slurm)) == len(nodes), f"a candidate ended before it could be held: {slurm.said(job)}"
    return held


def hold(slurm: LocalSlurm, job: int, *nodes: str) -> dict[str, int]:
    """Stop what each node's candidate reports through, so that it does not end; returns these processes by node."""
    held: dict[str, int] = {}

    def are_held() -> bool:
        for node in set(nodes) - set(held):
            if found := slurm.candidate_process(node):
                slurm.signal(node, "STOP", found[1])
                held[node] = found[1]
        return len(held) == len(nodes)

    slurm.wait(are_held, job)
    return held


def _others(slurm: LocalSlurm) -> list[str]:
    """The candidates in flight that are not the baseline."""
    return [candidate for candidate in running(slurm) if not candidate.startswith("c01-")]
