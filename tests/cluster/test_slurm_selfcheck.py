"""`selfcheck --measure` as a job's command, on a real Slurm of two nodes."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=2, gpus=0, cache=built_root) as local:
        yield local


def test_both_nodes_are_measured_and_what_there_is_survives_the_jobs_end(slurm: LocalSlurm) -> None:
    size = ("--nodes", 2, "--cpus-per-node", 2, "--time", 90)
    job = slurm.submit(*size, "--", "selfcheck", "--measure", "--budget", "1h", "--bundle", "bundle.tar.gz")
    slurm.wait_for_line(job, "on cpu of n1: complete, ")
    slurm.wait_for_line(job, "on cpu of n2: complete, ")
    slurm.login("scancel", "--batch", "--signal=USR1", job)
    assert slurm.ended(job) == "FAILED"
    log = slurm.said(job)
    assert slurm.field(job, "ExitCode") == "143:0", log
    assert "A/A floor, by which equal processes differ: " in log
    assert "ended early: SIGTERM" in log
    with tarfile.open(slurm.work / "bundle.tar.gz") as bundle:
        file = bundle.extractfile("bundle/measured.json")
        assert file is not None
        measured = json.load(file)
        assert {"bundle/checks.json", "bundle/environment.json", "bundle/trials.jsonl"} <= {*bundle.getnames()}
    assert {device["host"] for device in measured["devices"]} == {"n1", "n2"}
    assert {speeds["host_name"] for speeds in measured["bandwidth_gb_per_second"]} == {"n1", "n2"}
    assert not [*slurm.work.glob(".selfcheck-*")], "the folder became the bundle"
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))
