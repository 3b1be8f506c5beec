"""A slurmctld that is away for a while, at a job's start and under a study; and a node that is drained."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted
from slurm_studies import STUDY, prepare, records, summary, told

from tinyllm_ray.records import Fate

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=2, gpus=0, cache=built_root) as local:
        prepare(local)
        (local.work / "wait.yaml").write_text("setup: [touch here, 'until [ -e go ]; do sleep 0.2; done']")
        yield local


def test_a_study_begins_and_ends_around_a_slurmctld_that_is_away(slurm: LocalSlurm) -> None:
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 90, "--site", "wait.yaml", "--", *STUDY)
    slurm.wait((slurm.work / "here").exists)
    slurm.controller("away")
    (slurm.work / "go").touch()
    slurm.wait(lambda: "Unable to contact slurm controller (connect failure); asking again" in slurm.said(job))
    slurm.controller("back")
    slurm.wait(lambda: told(slurm, job)[Fate.COMPLETE] >= 1)
    slurm.login("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=tests")
    slurm.controller("away")
    before = told(slurm, job)[Fate.COMPLETE]
    slurm.wait(lambda: told(slurm, job)[Fate.COMPLETE] > before)
    slurm.controller("back")
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
    assert summary(slurm)["selected"] is not None
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))
