"""Two recipes studied within one budget, for real: real Ray, real processes, real tokens, and trainings that follow."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY_RECIPE, Finished, RunModule

from tinyllm_ray.config import load
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.tune.decisions import Shape, read_decisions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

BUDGET_SECONDS = 1200
"""Far more than it takes, so that a slow machine changes nothing; each study ends when its space is exhausted."""

# A baseline and one other, so that each study is over as soon as both are measured.
SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8]}
protocol: {warmup_updates: 1, windows: 2, updates_per_window: 1}
search_windows: by_count
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes of two sizes, one that no update of the space divides, and the space."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "small.yaml").write_text(TINY_RECIPE)
    (folder / "large.yaml").write_text(TINY_RECIPE.replace("width: 16", "width: 32"))
    (folder / "odd.yaml").write_text(TINY_RECIPE.replace("tokens_per_update: 512", "tokens_per_update: 192"))
    (folder / "space.yaml").write_text(SPACE)
    return folder


WRONG = ["--presets", "odd.yaml", "--space", "space.yaml", "--out", "wrong"]


def command(presets: str, *more: str) -> list[str]:
    own = ["--presets", presets, "--space", "space.yaml", "--runs", "1", "--out", "all", *more]
    return ["--budget", f"{BUDGET_SECONDS}s", *own]


@pytest.fixture(scope="module")
def studied(run_module: RunModule, folder: Path) -> Finished:
    return run_module("tinyllm_ray.tune", *command("small.yaml,odd.yaml,large.yaml"), cwd=folder, timeout=None)


@pytest.fixture(scope="module")
def out(studied: Finished, folder: Path) -> Path:
    assert studied.status == 0, studied.output
    return folder / "all"


@pytest.fixture(scope="module")
def summary(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return read


def records(folder: Path) -> list[TrialRecord]:
    return read_records(folder / "trials.jsonl")


def test_each_is_a_whole_study_and_all_end_within_one_budget(out: Path, summary: dict[str, Any]) -> None:
    names = {path.name for path in (out / "small").iterdir()}
    assert {"study.yaml", "trials.jsonl", "selected.yaml", "summary.json", "report.html", "candidates"} <= names
    assert names == {path.name for path in (out / "large").iterdir()}
    one, two = (json.loads((out / name / "summary.json").read_text()) for name in ("small", "large"))
    assert one["study"] != two["study"]
    for name, own in (("small", one), ("large", two)):
        assert {record.study for record in records(out / name)} == {own["study"]}
        assert {record.recipe_identity for record in records(out / name)} == {
            load(out / name / "selected.yaml").recipe_identity
        }
        assert own["ended"] is not None
        assert f"Ended: {own['ended']}" in (out / name / "report.html").read_text().replace("&#39;", "'")
    assert one["elapsed_seconds"] + two["elapsed_seconds"] < summary["elapsed_seconds"] < BUDGET_SECONDS


def test_a_recipe_that_cannot_be_studied_is_left_out_and_said(
    studied: Finished, out: Path, summary: dict[str, Any]
) -> None:
    states = {one["name"]: one["state"] for one in summary["studies"]}
    assert states.pop("odd") == "left out"
    assert set(states.values()) <= {"done", "short"}
    assert "odd is left out: space space" in studied.output
    assert not (out / "odd").exists()
    assert summary["ended"].endswith("left out: odd")


def test_ray_is_started_once_and_the_next_begins_with_what_the_first_showed(studied: Finished, out: Path) -> None:
    assert studied.output.count("starting Ray") == 1
    searched = [record for record in records(out / "small") if record.purpose == "search"]
    assert f"of the budget, beginning with what 1 other(s) showed in {len(searched)} trial(s)" in studied.output


def test_every_answer_stands_in_one_decision_file(out: Path, summary: dict[str, Any]) -> None:
    decisions = {one.promise.study: one for one in read_decisions(out / "decisions.yaml")}
    assert set(decisions) == {one["study"] for one in summary["studies"] if one["study"]}
    for name in ("small", "large"):
        selected = load(out / name / "selected.yaml")
        found = next(one for one in decisions.values() if one.shape == Shape.of(selected))
        assert found.execution == selected.execution


def test_the_list_of_studies_leads_to_each(out: Path, summary: dict[str, Any]) -> None:
    page = (out / "index.html").read_text()
    assert 'href="small/report.html"' in page
    assert 'href="large/report.html"' in page
    assert f"Ended: {summary['ended']}." in page


def test_a_training_follows_the_decision_and_says_so(out: Path, folder: Path, run_module: RunModule) -> None:
    decided = load(out / "large" / "selected.yaml").execution
    changed = ["--set", "training.max_updates=1", "--set", "optimizer.weight_decay=0.2"]
    arguments = ["--config", "large.yaml", *changed, "--decisions", "all/decisions.yaml", "--out", "run"]
    trained = run_module("tinyllm_ray.train", *arguments, cwd=folder, timeout=None)
    assert trained.status == 0, trained.output
    assert "all/decisions.yaml: the execution that study" in trained.output
    config = load(folder / "run" / "config.yaml")
    assert config.execution == decided
    assert config.optimizer.weight_decay == 0.2


def test_where_no_recipe_can_be_studied_it_is_a_mistake_and_nothing_is_written(
    folder: Path, run_module: RunModule
) -> None:
    done = run_module("tinyllm_ray.tune", "--budget", "1200s", *WRONG, cwd=folder, timeout=None)
    assert done.status == 2
    assert done.output.splitlines()[-1].startswith(
        "error: odd: space space: baseline.micro_batch_size: 8 does not divide"
    )
    assert not (folder / "wrong").exists()


def test_a_finished_whole_is_gone_on_with_for_nothing_and_another_is_refused(
    out: Path, folder: Path, run_module: RunModule
) -> None:
    before = {name: records(out / name) for name in ("small", "large")}
    other = run_module("tinyllm_ray.tune", *command("small.yaml,large.yaml", "--resume"), cwd=folder, timeout=None)
    assert other.status == 2
    assert "the presets are small.yaml,large.yaml, were small.yaml,odd.yaml,large.yaml" in other.output
    changed = ["--resume", "--set", "optimizer.weight_decay=0.3"]
    refused = run_module(
        "tinyllm_ray.tune", *command("small.yaml,odd.yaml,large.yaml", *changed), cwd=folder, timeout=None
    )
    assert refused.status == 2
    assert "optimizer.weight_decay is 0.3, was 0.1" in refused.output
    again = run_module(
        "tinyllm_ray.tune", *command("small.yaml,odd.yaml,large.yaml", "--resume"), cwd=folder, timeout=None
    )
    assert again.status == 0, again.output
    assert {name: records(out / name) for name in ("small", "large")} == before


def test_ctrl_c_keeps_what_was_measured_and_resume_studies_the_rest(built_root: Path, folder: Path) -> None:
    asked = [sys.executable, "-m", "tinyllm_ray.tune", *command("small.yaml,large.yaml")]
    asked[asked.index("all")] = "broken"
    environment = os.environ | {CACHE_VARIABLE: str(built_root)}
    first = subprocess.Popen(asked, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    said = []
    for line in first.stderr:
        said.append(line)
        if line.startswith("large: "):
            break
    first.send_signal(signal.SIGINT)
    rest = first.stderr.read()
    assert first.wait() == 128 + signal.SIGINT, "".join(said) + rest
    assert "Traceback" not in rest
    out = folder / "broken"
    summary = json.loads((out / "summary.json").read_text())
    assert [one["state"] for one in summary["studies"]] == ["done", "interrupted"]
    assert summary["ended"] == "SIGINT"
    kept = records(out / "small")
    subprocess.run([*asked, "--resume"], cwd=folder, env=environment, check=True, stderr=subprocess.PIPE)
    after = json.loads((out / "summary.json").read_text())
    assert [one["state"] for one in after["studies"]] == ["done", "done"]
    assert records(out / "small") == kept, "what was done is not done again"
    assert records(out / "large")
    assert after["elapsed_seconds"] > summary["elapsed_seconds"]
    assert len(read_decisions(out / "decisions.yaml")) == 2


def test_python_gives_a_result_for_each_recipe(
    built_root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinyllm_ray.tune import tune_presets

    monkeypatch.setenv(CACHE_VARIABLE, str(built_root))
    recipes = [str(folder / "small.yaml"), str(folder / "large.yaml")]
    shared = tmp_path / "shared.yaml"
    asked = {"space": folder / "space.yaml", "runs": 1, "decisions": shared}
    results = tune_presets(recipes, budget=f"{BUDGET_SECONDS}s", out=tmp_path / "all", **asked)
    assert list(results) == ["small", "large"]
    assert results["large"].config.model.width == 32
    assert len(read_decisions(shared)) == 2
