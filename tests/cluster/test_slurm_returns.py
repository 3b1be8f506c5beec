"""Jobs on a real Slurm that end before their work does, and come back: preempted, requeued, at their limit."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_slurm import SCRIPT, LocalSlurm, booted
from slurm_studies import STUDY, hold_in_flight, prepare, records, summary, told

from tinyllm_ray.records import Fate

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
CUT = {Fate.LOST, Fate.TIMED_OUT}
"""What the end of a job makes of a candidate in flight: it settles nothing."""


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=4, gpus=0, cache=built_root) as local:
        prepare(local)
        yield local


def assert_it_goes_on(slurm: LocalSlurm, job: int) -> None:
    """Of a job that is run again: it measures what it was at again, keeps what it has, and counts both runs."""
    slurm.wait(lambda: slurm.said(job).count("nodes ready at") >= 2)  # by then the first run has ended
    before, told_before = records(slurm), told(slurm, job)
    assert before
    slurm.wait(lambda: told(slurm, job)[Fate.COMPLETE] > told_before[Fate.COMPLETE], job)
    slurm.wait(lambda: len(records(slurm)) > len(before), job)
    after = records(slurm)
    assert after[: len(before)] == before
    assert {record.fate for record in after} <= {Fate.COMPLETE, *CUT}, "none is half measured"
    search = [record.execution_identity for record in after if record.purpose == "search" and record.fate not in CUT]
    assert len(search) == len(set(search)), "nothing is measured twice but what was cut"
    slurm.login("scancel", job)
    assert slurm.ended(job) == "CANCELLED"
    said = summary(slurm)
    used = sum(record.seconds.total or 0.0 for record in after)
    assert used < said["elapsed_seconds"] < said["budget_seconds"]
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))


def preempt(slurm: LocalSlurm, job: int) -> None:
    slurm.login("sbatch", "--partition=urgent", "--nodelist=n1", "--exclusive", "--time=1", "--wrap=true")


def requeue(slurm: LocalSlurm, job: int) -> None:
    slurm.login("scontrol", "requeue", job)


@pytest.mark.parametrize("end", [preempt, pytest.param(requeue, marks=pytest.mark.slow)])
def test_an_interrupted_study_comes_back_and_goes_on(slurm: LocalSlurm, end: Callable[[LocalSlurm, int], None]) -> None:
    size = ("--cpus-per-node", 4, "--time", 90, "--requeue", "--sbatch=--nodelist=n1")
    job = slurm.submit(*size, "--", *STUDY)
    hold_in_flight(slurm, job, "n1")
    end(slurm, job)
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1")
    assert_it_goes_on(slurm, job)


@pytest.mark.slow
def test_a_job_whose_node_goes_down_comes_back_on_another(slurm: LocalSlurm) -> None:
    job = slurm.submit("--cpus-per-node", 4, "--time", 90, "--requeue", "--", *STUDY)
    slurm.wait_for_line(job, "nodes ready at")
    lost = slurm.field(job, "NodeList")
    hold_in_flight(slurm, job, lost)
    slurm.kill(lost)
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1" and slurm.field(job, "JobState") == "RUNNING")
    assert slurm.field(job, "NodeList") != lost
    subprocess.run([SCRIPT, "revive", slurm.folder, lost], check=True)
    assert_it_goes_on(slurm, job)


@pytest.mark.slow
def test_a_budget_longer_than_the_limit_is_spent_in_several_runs(slurm: LocalSlurm) -> None:
    size = ("--cpus-per-node", 4, "--time", 2, "--requeue", "--sbatch=--nodelist=n1")
    job = slurm.submit(*size, "--", *STUDY, "--updates-per-window", 15)  # a run is short for a busy machine
    process = hold_in_flight(slurm, job, "n1")["n1"]
    candidate = slurm.candidate_process("n1")
    assert candidate is not None
    slurm.signal("n1", "STOP", candidate[0])  # so that there is more to do at the limit
    slurm.signal("n1", "CONT", process)
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1")
    assert "the allocation ends before the work does" in slurm.said(job)
    said = summary(slurm)
    assert said["ended"] != "SIGTERM", "its deadline comes before the warning is passed on"
    assert_it_goes_on(slurm, job)
