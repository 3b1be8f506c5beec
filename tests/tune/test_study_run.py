"""What a study does about its machine before it measures."""

import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from tinyllm_ray.cluster.connect import Connection
from tinyllm_ray.tune.study_run import claim_machine


def test_studies_on_the_same_gpus_know_of_each_other_however_these_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight GPUs by their UUIDs have a name of 327 letters, and a file's has 255 at most."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uuids = [f"GPU-{number:08d}-1234-1234-1234-123456789012" for number in range(8)]
    machine, console = Connection("", None, started=True, nodes=1, gpus=8, cores_per_node=8), Console(quiet=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(uuids))
    with claim_machine(console, machine) as first, claim_machine(console, machine) as second:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuids[0])
        with claim_machine(console, machine) as beside:
            assert (first, second, beside) == (True, False, True)
