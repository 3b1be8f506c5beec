"""Faults under a real study on a real Slurm: it goes on with what is left, or ends with its report and a status."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted
from slurm_studies import (
    MANY_STUDY,
    SPACE,
    STUDY,
    hold,
    hold_in_flight,
    prepare,
    records,
    running,
    summary,
    told,
    wait_for_one_in_flight,
)

from tinyllm_ray.records import Fate

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
RAYLET = r"\S*/raylet/raylet "


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=3, cpus=2, gpus=0, cache=built_root) as local:
        prepare(local)
        yield local


def begin(slurm: LocalSlurm, nodes: int, study: tuple[str, ...] = STUDY) -> int:
    return slurm.submit("--nodes", nodes, "--cpus-per-node", 2, "--time", 90, "--", *study)


def end(slurm: LocalSlurm, job: int) -> None:
    """Have a study end with what it has."""
    slurm.login("scancel", "--batch", "--signal=USR1", job)
    assert slurm.ended(job) == "FAILED"
    assert slurm.field(job, "ExitCode") == "143:0", slurm.said(job)


def assert_every_record_stands(slurm: LocalSlurm) -> None:
    """What the summary calls measured has its record, and its configuration."""
    rows = [row for row in summary(slurm)["candidates"] if row["state"] in {fate.value for fate in Fate}]
    assert {row["candidate"] for row in rows} <= {record.candidate for record in records(slurm)}
    for row in rows:
        assert (slurm.work / "study" / "candidates" / f"{row['candidate']}.yaml").exists()


def test_a_study_goes_on_through_a_killed_raylet_a_lost_node_and_a_lost_folder(slurm: LocalSlurm) -> None:
    job = begin(slurm, nodes=3)
    process = hold_in_flight(slurm, job, "n1", "n2", "n3")
    held = running(slurm)
    before, begun = told(slurm, job), slurm.said(job).count(": running")
    (slurm.work / "study").rename(slurm.work / "away")
    slurm.end_process("n3", RAYLET)
    slurm.kill("n2")
    # What was lost is begun again before there is a figure that could make it needless.
    slurm.wait(lambda: told(slurm, job) - before == Counter({Fate.LOST: 2}), job)
    slurm.wait(lambda: slurm.said(job).count(": running") == begun + 2, job)
    slurm.signal("n1", "CONT", process["n1"])
    slurm.wait(lambda: (told(slurm, job) - before)[Fate.COMPLETE] >= 2, job)
    assert not (slurm.work / "study").exists(), "nothing takes the place of a folder that is away"
    (slurm.work / "away").rename(slurm.work / "study")
    slurm.wait_for_line(job, "cluster: lost n3 (its step ended with 1")
    slurm.wait_for_line(job, "cluster: lost n2 (")
    slurm.wait(lambda: lost(slurm) <= settled(slurm), job)
    end(slurm, job)

    found = records(slurm)
    assert Counter(record.fate for record in found) == told(slurm, job), "what was said is recorded, and nothing else"
    assert Counter(record.fate for record in found if record.candidate in held) == {Fate.LOST: 2, Fate.COMPLETE: 3}
    assert {record.fate for record in found} == {Fate.COMPLETE, Fate.LOST}
    assert_every_record_stands(slurm)
    assert summary(slurm)["selected"] is not None
    slurm.wait(lambda: slurm.is_empty("n1", "n3"))


def lost(slurm: LocalSlurm) -> set[str]:
    """Executions of which a candidate was lost."""
    return {record.execution_identity for record in records(slurm) if record.fate == Fate.LOST}


def settled(slurm: LocalSlurm) -> set[str]:
    """Executions of which a candidate was not lost."""
    return {record.execution_identity for record in records(slurm) if record.fate != Fate.LOST}


@pytest.mark.slow
def test_a_study_that_has_lost_a_node_ends_like_one_that_has_not(slurm: LocalSlurm) -> None:
    (slurm.work / "space.yaml").write_text(SPACE.replace("[1, 2, 4, 8]", "[8]"))  # the baseline, on either node
    job = begin(slurm, nodes=2)
    slurm.wait(lambda: len(running(slurm)) == 2, job)
    process = hold(slurm, job, "n1", "n2")
    slurm.kill("n2")
    slurm.signal("n1", "CONT", process["n1"])
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    assert {record.fate for record in records(slurm)} == {Fate.COMPLETE, Fate.LOST}
    assert_every_record_stands(slurm)
    assert summary(slurm)["selected"] is not None
    slurm.wait(lambda: slurm.is_empty("n1"))


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
    hold_in_flight(slurm, job, "n1", "n2")
    before = records(slurm)
    slurm.end_process("n1", process)
    assert slurm.ended(job) == "FAILED", slurm.said(job)
    assert slurm.field(job, "ExitCode") == status, slurm.said(job)
    assert records(slurm)[: len(before)] == before
    assert {record.fate for record in records(slurm)} <= {Fate.COMPLETE, Fate.LOST}
    assert_every_record_stands(slurm)
    assert json.loads((slurm.work / "study" / "summary.json").read_text())["baseline"]["fate"] == "complete"
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))


@pytest.mark.slow
def test_a_full_tmp_costs_nothing(built_root: Path) -> None:
    with booted(nodes=1, cpus=2, gpus=0, cache=built_root, tmp_mb=300) as slurm:
        prepare(slurm)
        job = begin(slurm, 1, MANY_STUDY)
        wait_for_one_in_flight(slurm, job)
        before = len(records(slurm))
        slurm.on("n1", "sh", "-c", "cat /dev/zero > /tmp/full || true")
        slurm.wait(lambda: len(records(slurm)) >= before + 2, job)
        end(slurm, job)
        assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
        assert_every_record_stands(slurm)


@pytest.mark.slow
def test_nodes_that_cannot_help_any_more_are_handed_back(slurm: LocalSlurm) -> None:
    # The one other candidate is much faster than the baseline, so that the study verifies it, on one node.
    space = SPACE.replace("micro_batch_size: 8", "micro_batch_size: 1").replace("[1, 2, 4, 8]", "[1, 8]")
    (slurm.work / "space.yaml").write_text(space)
    job = begin(slurm, nodes=3)
    slurm.wait_for_line(job, "cluster: handed back n")
    slurm.wait(lambda: int(slurm.field(job, "NumNodes")) < 3, job)
    before = len(records(slurm))
    slurm.wait(lambda: len(records(slurm)) > before, job)
    end(slurm, job)
    assert "cluster: lost" not in slurm.said(job)
    assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
    slurm.wait(lambda: slurm.is_empty("n1", "n2", "n3"))


@pytest.mark.slow
def test_a_heads_node_that_goes_down_ends_the_job_on_the_others_too(slurm: LocalSlurm) -> None:
    job = begin(slurm, nodes=2)
    hold_in_flight(slurm, job, "n1", "n2")
    before = records(slurm)
    slurm.kill("n1")
    assert slurm.ended(job) == "CANCELLED", "Slurm itself would keep it until its limit"
    slurm.wait(lambda: slurm.is_empty("n2"))
    assert records(slurm)[: len(before)] == before
    assert_every_record_stands(slurm)
