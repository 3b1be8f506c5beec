"""Faults under a real study on a real Slurm: it goes on with what is left, or ends with its report and a status."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted
from slurm_studies import SPACE, STUDY, prepare, records, running, summary, wait_for_a_candidate_in_flight

from tinyllm_ray.records import Fate

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=3, cpus=2, gpus=0, cache=built_root) as local:
        prepare(local)
        yield local


def begin(slurm: LocalSlurm, nodes: int) -> int:
    size = ("--nodes", nodes, "--cpus-per-node", 2, "--time", 15)
    return slurm.submit(*size, "--", "tune", "--budget", "10m", *STUDY)


def assert_every_record_stands(slurm: LocalSlurm) -> None:
    """What the summary calls measured has its record, and its configuration."""
    rows = [row for row in summary(slurm)["candidates"] if row["state"] in {fate.value for fate in Fate}]
    assert {row["candidate"] for row in rows} <= {record.candidate for record in records(slurm)}
    for row in rows:
        assert (slurm.work / "study" / "candidates" / f"{row['candidate']}.yaml").exists()


def test_a_study_goes_on_through_a_killed_raylet_a_lost_node_and_a_lost_folder(slurm: LocalSlurm) -> None:
    (slurm.work / "space.yaml").write_text(SPACE.replace("[4, 8]", "[1, 2, 4, 8]"))  # four candidates help at once
    job = begin(slurm, nodes=3)
    slurm.wait_for_line(job, "3 of 3 nodes ready")
    slurm.wait(lambda: len(running(slurm)) == 3)
    slurm.end_process("n3", r"\S*/raylet/raylet ")
    slurm.kill("n2")
    slurm.wait_for_line(job, "cluster: lost n3 (its step ended with 1")

    # What was on the two nodes has not been measured yet, so that there is more to come.
    measured = slurm.log(job).read_text().count(": complete")
    (slurm.work / "study").rename(slurm.work / "away")
    slurm.wait(lambda: slurm.log(job).read_text().count(": complete") > measured)
    (slurm.work / "away").rename(slurm.work / "study")

    assert slurm.ended(job) == "COMPLETED", slurm.log(job).read_text()
    found = records(slurm)
    assert {record.fate for record in found} == {Fate.COMPLETE, Fate.LOST}
    settled = {record.execution_identity for record in found if record.fate != Fate.LOST}
    assert {record.execution_identity for record in found} == settled, "what was lost is measured on what is left"
    assert_every_record_stands(slurm)
    assert summary(slurm)["selected"] is not None
    slurm.wait(lambda: slurm.is_empty("n1", "n3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "status"),
    [
        (r"\S*/gcs_server ", "1:0"),
        (r"\S+ -m tinyllm_ray\.tune\.study_process", "1:0"),
        (r"\S+ -m tinyllm_ray\.tune --budget", "137:0"),
    ],
    ids=["head", "study", "supervisor"],
)
def test_a_dead_head_or_driver_ends_the_job_with_its_report(slurm: LocalSlurm, process: str, status: str) -> None:
    job = begin(slurm, nodes=2)
    wait_for_a_candidate_in_flight(slurm)
    before = records(slurm)
    slurm.end_process("n1", process)
    assert slurm.ended(job) == "FAILED", slurm.log(job).read_text()
    assert slurm.field(job, "ExitCode") == status, slurm.log(job).read_text()
    assert records(slurm)[: len(before)] == before
    assert {record.fate for record in records(slurm)} <= {Fate.COMPLETE, Fate.LOST}
    assert_every_record_stands(slurm)
    assert json.loads((slurm.work / "study" / "summary.json").read_text())["baseline"]["fate"] == "complete"
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))


@pytest.mark.slow
def test_a_full_tmp_costs_nothing(built_root: Path) -> None:
    with booted(nodes=1, cpus=2, gpus=0, cache=built_root, tmp_mb=300) as slurm:
        prepare(slurm)
        job = begin(slurm, nodes=1)
        wait_for_a_candidate_in_flight(slurm)
        before = len(records(slurm))
        slurm.on("n1", "sh", "-c", "cat /dev/zero > /tmp/full || true")
        slurm.wait(lambda: len(records(slurm)) >= before + 2)
        slurm.login("scancel", "--batch", "--signal=USR1", job)
        assert slurm.ended(job) == "FAILED"
        assert slurm.field(job, "ExitCode") == "143:0", slurm.log(job).read_text()
        assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
        assert_every_record_stands(slurm)


@pytest.mark.slow
def test_nodes_that_cannot_help_any_more_are_handed_back(slurm: LocalSlurm) -> None:
    (slurm.work / "space.yaml").write_text(SPACE.replace(", sdpa_backend: [auto, math]", ""))
    job = begin(slurm, nodes=3)
    slurm.wait_for_line(job, "cluster: handed back n")
    slurm.wait(lambda: int(slurm.field(job, "NumNodes")) < 3)
    assert slurm.ended(job) == "COMPLETED", slurm.log(job).read_text()
    assert "cluster: lost" not in slurm.log(job).read_text()
    assert len(records(slurm)) == 2
    assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
    slurm.wait(lambda: slurm.is_empty("n1", "n2", "n3"))


@pytest.mark.slow
def test_a_heads_node_that_goes_down_ends_the_job_on_the_others_too(slurm: LocalSlurm) -> None:
    job = begin(slurm, nodes=2)
    wait_for_a_candidate_in_flight(slurm)
    before = records(slurm)
    slurm.kill("n1")
    assert slurm.ended(job) == "CANCELLED", "Slurm itself would keep it until its limit"
    slurm.wait(lambda: slurm.is_empty("n2"))
    assert records(slurm)[: len(before)] == before
    assert_every_record_stands(slurm)
