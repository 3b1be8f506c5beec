"""Studies that share a budget from the command line to the decision file; all is real but Ray and what it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from played_ray import RECIPE, SPACE

from tinyllm_ray.records import read_records
from tinyllm_ray.tune.decisions import read_decisions
from tinyllm_ray.tune.sessions import read_sessions

PROGRAM = """
import sys
from played_ray import play_ray
from tinyllm_ray.tune import __main__ as command
play_ray()
sys.exit(command.main(sys.argv[1:]))
"""
ASKED = ["--budget", "2h", "--presets", "small.yaml,odd.yaml,large.yaml", "--space", "space.yaml", "--out", "all"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Recipes of two sizes, one that no update of the space divides, and the space."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "large.yaml").write_text(RECIPE.replace("width: 16", "width: 32"))
    (tmp_path / "odd.yaml").write_text(RECIPE.replace("tokens_per_update: 512", "tokens_per_update: 192"))
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def tune(folder: Path) -> str:
    """What is said; it has to come to an answer."""
    temporary = folder / "node"
    temporary.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths}
    command = [sys.executable, "-c", PROGRAM, *ASKED]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def summary(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return read


def test_each_is_studied_once_and_decided_on_and_listed(folder: Path) -> None:
    said, out = tune(folder), folder / "all"
    assert said.count("starting Ray") == 1
    assert "odd is left out: space space" in said
    assert {one["name"]: one["state"] for one in summary(out)["studies"]} == {
        "small": "done",
        "odd": "left out",
        "large": "done",
    }
    records = {name: read_records(out / name / "trials.jsonl") for name in ("small", "large")}
    own = {name: {record.study for record in found} for name, found in records.items()}
    assert own == {name: {summary(out / name)["study"]} for name in own}, "each record in its own study's folder"
    assert f"beginning with what 1 other(s) showed in {_searched(records['small'])} trial(s)" in said
    decided = {one.promise.study: one for one in read_decisions(out / "decisions.yaml")}
    assert set(decided) == set.union(*own.values())
    assert {one.shape.width for one in decided.values()} == {16, 32}
    page = (out / "index.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in own)
    (whole,), (small,), (large,) = (read_sessions(one) for one in (out, out / "small", out / "large"))
    assert whole["seconds"] >= small["seconds"] + large["seconds"]


def _searched(records: list[Any]) -> int:
    return len([record for record in records if record.purpose == "search"])
