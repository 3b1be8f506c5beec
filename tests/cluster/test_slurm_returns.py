"""Jobs on a real Slurm that end before their work does, and come back: preempted, requeued, at their limit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TINY_RECIPE
from local_slurm import LocalSlurm, booted

from tinyllm_ray.records import Fate, TrialRecord, read_records

pytestmark = pytest.mark.slurm

SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8], sdpa_backend: [auto, math]}
protocol: {warmup_updates: 1, windows: 2, updates_per_window: 10}
"""
STUDY = ("--config", "recipe.yaml", "--space", "space.yaml", "--objective", "throughput", "--out", "study")


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=4, gpus=0, cache=built_root) as local:
        (local.work / "recipe.yaml").write_text(TINY_RECIPE)
        (local.work / "space.yaml").write_text(SPACE)
        yield local


def records(slurm: LocalSlurm) -> list[TrialRecord]:
    return read_records(slurm.work / "study" / "trials.jsonl")


def wait_for_a_candidate_in_flight(slurm: LocalSlurm) -> None:
    """Until one candidate's record is in OUT, and the next one has begun."""

    def begun() -> bool:
        try:
            rows = json.loads((slurm.work / "study" / "summary.json").read_text())["candidates"]
        except FileNotFoundError:
            return False
        return bool(records(slurm)) and any(row["state"] == "running" for row in rows)

    slurm.wait(begun, 200)


def assert_it_went_on(slurm: LocalSlurm, job: int, before: list[TrialRecord]) -> None:
    assert slurm.ended(job, 240) == "COMPLETED", slurm.log(job).read_text()
    assert slurm.field(job, "Restarts") == "1"
    after = records(slurm)
    assert after[: len(before)] == before, "what was recorded stays"
    assert len(after) > len(before)
    search = [record.execution_identity for record in after if record.purpose == "search" and record.fate != Fate.LOST]
    assert len(search) == len(set(search)), "nothing is measured twice, but what was lost"
    assert {record.fate for record in after} <= {Fate.COMPLETE, Fate.LOST, Fate.DOMINATED}
    summary = json.loads((slurm.work / "study" / "summary.json").read_text())
    assert "interrupted" not in {row["state"] for row in summary["candidates"]}
    used = sum(record.seconds.total or 0.0 for record in after)
    assert used < summary["elapsed_seconds"] < summary["budget_seconds"], "both runs count"
    for node in ("n1", "n2"):
        slurm.wait(lambda node=node: not slurm.processes(node), 30)


def test_a_preempted_study_comes_back_and_goes_on(slurm: LocalSlurm) -> None:
    size = ("--cpus-per-node", 4, "--time", 10, "--requeue", "--sbatch=--nodelist=n1")
    job = slurm.submit(*size, "--", "tune", "--budget", "5m", *STUDY)
    wait_for_a_candidate_in_flight(slurm)
    slurm.login("sbatch", "--partition=urgent", "--nodelist=n1", "--exclusive", "--time=1", "--wrap=true")
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1", 60)
    before = records(slurm)
    assert_it_went_on(slurm, job, before)
