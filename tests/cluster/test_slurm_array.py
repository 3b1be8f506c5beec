"""Tasks of a job array, of which the last one's number is the whole array's, on a real Slurm."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

WAIT = """
import pathlib, time
print("the command runs", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.2)
"""


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=2, gpus=0, cache=built_root) as local:
        (local.work / "wait.py").write_text(WAIT)
        yield local


def test_each_task_has_a_cluster_of_its_own_and_ends_alone(slurm: LocalSlurm) -> None:
    last = slurm.submit("--cpus-per-node", 2, "--time", 90, "--sbatch=--array=1-2", "--", "wait.py")
    first = last + 1
    for task in (last, first):
        slurm.wait(lambda task=task: "the command runs" in slurm.said(task))  # type: ignore[misc]
        assert "cluster: 1 of 1 nodes ready" in slurm.said(task)
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "status", first)
    assert f"job {first}: RUNNING on " in told
    slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "cancel", first)
    slurm.wait(lambda: state(slurm, first) == "CANCELLED")
    assert state(slurm, last) == "RUNNING"
    (slurm.work / "go").touch()
    slurm.wait(lambda: state(slurm, last) == "COMPLETED")


def state(slurm: LocalSlurm, task: int) -> str:
    """A task's state; its first word."""
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "status", task)
    return told.split()[2]
