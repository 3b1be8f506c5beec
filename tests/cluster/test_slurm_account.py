"""The account of jobs on a real Slurm whose sacct has a data base."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_slurm import LocalSlurm, booted

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        shutil.which("slurmdbd") is None or shutil.which("mariadbd") is None,
        reason="no slurmdbd, mariadbd: apt-get install slurmdbd mariadb-server",
    ),
]


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=1, cpus=2, gpus=2, cache=built_root, accounting="full") as local:
        (local.work / "stop.py").write_text("raise SystemExit(7)")
        yield local


def account(slurm: LocalSlurm, job: int) -> dict[str, Any]:
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "account", job, "--json")
    found: dict[str, Any] = json.loads(told)
    return found


def test_a_requeued_job_has_both_of_its_runs_with_their_gpus(slurm: LocalSlurm) -> None:
    size = ("--cpus-per-node", 1, "--gpus-per-node", 2, "--time", 90, "--requeue")
    job = slurm.submit(*size, "--site", site(slurm, "until [ -e go ]; do sleep 0.2; done"), "--", "stop.py")
    slurm.wait(lambda: slurm.field(job, "JobState") == "RUNNING")
    slurm.login("scontrol", "requeue", job)
    slurm.wait(lambda: slurm.field(job, "Restarts") == "1")
    (slurm.work / "go").touch()
    assert slurm.ended(job) == "FAILED"
    # The data base hears of it later.
    slurm.wait(lambda: [run["state"] for run in account(slurm, job)["jobs"][str(job)]] == ["REQUEUED", "FAILED"])
    first, second = account(slurm, job)["jobs"][str(job)]
    assert (first["gpus"], second["gpus"], second["exit_code"]) == (2, 2, "7:0")
    assert first["begin"] <= first["end"] <= second["begin"] < second["end"]
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "account", job)
    assert told.startswith(f"job {job}: REQUEUED after ")
    assert told.rstrip().endswith(", exit 7:0 (from sacct)")


def site(slurm: LocalSlurm, line: str) -> str:
    """A site file whose jobs run that line of shell first."""
    (slurm.work / "site.yaml").write_text(json.dumps({"setup": [line]}))
    return "site.yaml"
