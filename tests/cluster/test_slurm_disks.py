"""Disks without room, on a real Slurm: a node's /tmp at its start, and the job's log."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, booted
from slurm_studies import SPACE, STUDY, prepare, records, summary

from tinyllm_ray.records import Fate

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=2, gpus=0, cache=built_root, tmp_mb=300) as local:
        prepare(local)
        (local.work / "space.yaml").write_text(SPACE.replace("[1, 2, 4, 8]", "[8]"))
        (local.work / "count.py").write_text("import ray; ray.init(); print('NODES', len(ray.nodes()))")
        yield local


def test_a_node_whose_tmp_is_full_at_its_start_is_named_with_the_reason(slurm: LocalSlurm) -> None:
    slurm.on("n2", "sh", "-c", "dd if=/dev/zero of=/tmp/fill bs=1M 2>/dev/null; true")
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 90, "--", "count.py")
    assert slurm.ended(job) == "FAILED"
    assert slurm.field(job, "ExitCode") == "3:0"
    assert "missing: n2 (/tmp: No space left on device; give the site another scratch folder)" in slurm.said(job)
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))


def test_a_job_whose_log_cannot_be_written_studies_to_its_end(slurm: LocalSlurm) -> None:
    size = ("--cpus-per-node", 2, "--time", 90, "--sbatch=--output=/dev/full")
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "submit", *size, "--", *STUDY)
    job = int(told.split(",")[0].removeprefix("job "))
    assert slurm.ended(job) == "COMPLETED"
    assert {record.fate for record in records(slurm)} == {Fate.COMPLETE}
    assert summary(slurm)["selected"] is not None


def test_a_log_folder_that_cannot_be_written_costs_the_nodes_logs(slurm: LocalSlurm) -> None:
    folder = slurm.work / "tinyllm-1"  # the first job's
    folder.mkdir()
    for node in ("n1", "n2"):
        slurm.on(node, "mount", "--bind", str(folder), str(folder))
        slurm.on(node, "mount", "-o", "remount,ro,bind", str(folder))
        with pytest.raises(subprocess.CalledProcessError):
            slurm.on(node, "touch", str(folder / "file"))
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 90, "--", "count.py")
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    assert "NODES 2" in slurm.said(job)
    assert f"{folder}/n2.log: Read-only file system; what the node says is lost" in slurm.said(job)
