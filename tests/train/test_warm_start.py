"""A selected configuration starts warm where nothing was compiled yet: `nano`, from the candidate to the training."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promised

from tinyllm_ray.config import load
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.promise import CompiledFile
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.train.compile_artifact import GRAPHS
from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE

pytestmark = [
    pytest.mark.slow,  # a CPU's kernels are compiled
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the counts are a CPU's"),
]

TRAIN = """
import json, sys
from tinyllm_ray.train.__main__ import main
status = main(sys.argv[1:])
from torch._dynamo.utils import counters
print("COUNTS", json.dumps({"status": status, **counters["aot_autograd"], **counters["inductor"]}))
"""


def run(arguments: list[str], caches: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {FOLDER_VARIABLE: str(caches)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        check=True,
        text=True,
    )


def trained(selected: Path, out: Path, caches: Path) -> tuple[dict[str, Any], str]:
    """What PyTorch counted in `train --config selected.yaml`, and what the command said."""
    done = run(["-c", TRAIN, "--config", str(selected), "--out", str(out)], caches)
    counts = next(line for line in done.stdout.splitlines() if line.startswith("COUNTS "))
    return json.loads(counts.removeprefix("COUNTS ")), done.stderr


def test_a_tuned_training_finds_its_graphs_and_kernels(tiny_cache: TokenCache, tmp_path: Path) -> None:
    settings = ["execution.update=compiled", "execution.cpu_threads=1", "training.tokens_per_update=1024"]
    settings += ["training.max_updates=6", "output.checkpoint=none", f"data.cache={tiny_cache.folder}"]
    config = load("nano", settings)
    (tmp_path / "candidates").mkdir()
    arguments = ["one_candidate.py", config.model_dump_json(), str(tmp_path / "candidates")]
    record = TrialRecord.model_validate_json(run(arguments, tmp_path / "first").stdout)
    assert record.fate.value == "complete", record.reason
    artifact = tmp_path / "candidates" / "c001.compiled"
    with zipfile.ZipFile(artifact) as archive:
        libraries = set(archive.namelist()) - {GRAPHS}
    assert libraries, "a CPU's kernels are shared libraries"
    assert record.compile_cache is not None
    compiled = CompiledFile(
        file="candidates/c001.compiled",
        sha256=hashlib.sha256(artifact.read_bytes()).hexdigest(),
        machine=Path(record.compile_cache).name,
        source=source_identity().sha256,
    )
    selected = tmp_path / "selected.yaml"
    selected.write_text(promised(config, compiled=compiled.model_dump()).to_yaml())

    counts, said = trained(selected, tmp_path / "warm", tmp_path / "second")
    assert counts["status"] == 0
    assert f"compiled code {artifact} is used" in said
    assert counts["autograd_cache_hit"] >= 1
    assert counts["fxgraph_cache_hit"] >= 2, "forward and backward"
    assert counts.get("autograd_cache_miss", 0) == counts.get("fxgraph_cache_miss", 0) == 0
    (machine,) = (folder for folder in (tmp_path / "second").iterdir() if folder.name == compiled.machine)
    kernels = {str(path.relative_to(machine)) for path in machine.rglob("*.main.so")}
    assert kernels <= libraries, "no kernel was compiled"
    result = json.loads((tmp_path / "warm" / "result.json").read_text())
    assert result["promise"]["proof"]["attention"] == ["flash"]
    assert result["promise"]["proof"]["faults"] == []
    # The run's own configuration names the file from anywhere.
    again = load(tmp_path / "warm" / "config.yaml").tuned
    assert again is not None
    assert again.compiled is not None
    assert again.compiled.file == str(artifact)
