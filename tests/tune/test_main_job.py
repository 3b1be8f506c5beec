"""The main job from its command line: a real study over real Ray on real tokens, and a training with its answer."""

import html
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Finished, RunModule
from linux_processes import catches
from small_caches import MakeCache

from tinyllm_ray.config import load
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.data.unigram import unigram_level
from tinyllm_ray.records import Fate, TrialRecord, read_records

BUDGET_SECONDS = 150


@dataclass(frozen=True)
class Interrupted:
    """A study as Ctrl-C left it, after its first candidate."""

    command: list[str]
    summary: dict
    records: list[TrialRecord]
    files: dict[str, str]
    said: str
    """From the interruption on."""
    wall_seconds: float


@pytest.fixture(scope="module")
def interrupted(built_root: Path, tiny: Path) -> Interrupted:
    command = [sys.executable, "-m", "tinyllm_ray.tune", "--budget", f"{BUDGET_SECONDS}s", "--out", "study"]
    # So many that measuring more pays wherever this runs, and too few for a minute under load to be worth its time.
    command += ["--config", "recipe.yaml", "--space", "space.yaml", "--runs", "100"]
    environment = os.environ | {CACHE_VARIABLE: str(built_root)}
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=tiny, env=environment, stderr=subprocess.PIPE, text=True) as study:
        assert study.stderr is not None
        for line in study.stderr:
            if ": complete" in line:
                break
        study.send_signal(signal.SIGINT)
        said = study.stderr.read()
        assert study.wait() == 128 + signal.SIGINT, said
    wall, folder = time.monotonic() - begin, tiny / "study"
    files = {name: (folder / name).read_text() for name in ("report.html", "selected.yaml")}
    summary = json.loads((folder / "summary.json").read_text())
    return Interrupted(command[3:], summary, read_records(folder / "trials.jsonl"), files, said, wall)


@pytest.fixture(scope="module")
def study(interrupted: Interrupted, run_module: RunModule, tiny: Path) -> tuple[Path, Finished]:
    """The folder of the same study, which has gone on to its end, and what its second session said."""
    done = run_module("tinyllm_ray.tune", *interrupted.command, "--resume", cwd=tiny)
    return tiny / "study", done


@pytest.fixture(scope="module")
def summary(study: tuple[Path, Finished]) -> dict:
    folder, done = study
    assert done.status == 0, done.output
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def records(study: tuple[Path, Finished]) -> list[TrialRecord]:
    return read_records(study[0] / "trials.jsonl")


def test_it_ends_inside_the_budget_and_says_so(summary: dict) -> None:
    assert summary["budget_seconds"] == BUDGET_SECONDS
    assert 0 < summary["elapsed_seconds"] < BUDGET_SECONDS
    assert summary["budget_exhausted"] is False
    assert summary["ended"].startswith(("space exhausted", "nothing left is expected to save more"))


def test_its_page_is_that_of_the_study_at_its_end(study: tuple[Path, Finished], summary: dict) -> None:
    page = html.unescape((study[0] / "report.html").read_text())
    assert f"Ended: {summary['ended']}" in page
    assert all(row["label"] in page for row in summary["candidates"])
    assert f"{summary['selected']['targets_per_second']:,.0f} targets/s" in page


def test_the_baseline_is_measured_first_and_every_candidate_once(summary: dict, records: list[TrialRecord]) -> None:
    labels = [row["label"] for row in summary["candidates"]]
    assert records[0].candidate == summary["baseline"]["candidate"] == summary["eager"]["candidate"]
    assert "mb8 eager auto t1" in labels
    searched = {label.removesuffix(" again") for label in labels}
    assert searched <= {"mb4 eager auto t1", "mb4 eager math t1", "mb8 eager auto t1", "mb8 eager math t1"}
    measured = [record.candidate for record in records]
    assert len(set(measured)) == len(measured)
    assert sorted(measured) == sorted(
        row["candidate"] for row in summary["candidates"] if row["state"] not in {"skipped", "not_started"}
    )


def test_a_record_holds_what_was_seen(records: list[TrialRecord], summary: dict) -> None:
    for record in records:
        assert record.fate == Fate.COMPLETE
        assert record.study == summary["study"]
        assert record.recipe_identity == summary["recipe_identity"]
        assert record.cache_identity == summary["cache_identity"] is not None
        assert all(window.targets == 512 * window.updates for window in record.windows)
        if record.purpose == "search":  # verification's windows are as long as the noise asks for
            assert [window.updates for window in record.windows] == [2, 2]
            assert all(window.loss is not None and 9 < window.loss < 11 for window in record.windows)
        assert record.first_update_seconds is not None
        assert record.seconds.total is not None
        assert record.seconds.total > (record.seconds.start or 0) + record.first_update_seconds
        assert record.devices[0].kind == "cpu"
        assert record.environment["versions"]["torch"]
        assert record.memory.used_bytes
    # Candidates share seed and data order, so they learn the same whatever their execution.
    first_losses = [record.windows[0].loss for record in records if record.purpose == "search"]
    assert first_losses == pytest.approx([first_losses[0]] * len(first_losses), rel=1e-5)


def test_a_candidates_configuration_is_the_recipe_under_its_execution(
    study: tuple[Path, Finished], records: list[TrialRecord]
) -> None:
    for record in records:
        assert record.configuration is not None
        config = load(study[0] / record.configuration)
        assert config.recipe_identity == record.recipe_identity
        assert config.execution.model_dump(mode="json") == record.execution


def test_the_selected_configuration_trains(
    study: tuple[Path, Finished], summary: dict, run_module: RunModule, make_cache: MakeCache, tmp_path: Path
) -> None:
    folder, done = study
    assert "next: python -m tinyllm_ray.train --config study/selected.yaml --out " in done.output
    assert load(folder / "selected.yaml").execution.model_dump(mode="json") == summary["selected"]["execution"]
    promise = load(folder / "selected.yaml").tuned
    assert promise is not None
    assert promise.candidate == summary["selected"]["candidate"]
    assert promise.low < promise.targets_per_second < promise.high
    # Of few tokens to validate on, as the default corpus's take a model of any size 15 s.
    cache = make_cache([n % 32_000 for n in range(40_000)], 10_000, vocab_size=32_000, validation=range(5000))
    settings = ("--set", "training.max_updates=3", "--set", f"data.cache={cache.folder}")
    arguments = ("--config", folder / "selected.yaml", *settings, "--out", "run")
    trained = run_module("tinyllm_ray.train", *arguments, cwd=tmp_path)
    assert trained.status == 0, trained.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "complete"
    assert result["step"] == 3
    assert "promised: " in trained.output
    assert result["promise"]["not_compared"] is None
    assert result["promise"]["predicted_seconds"]["total"] > promise.start_seconds > 0
    assert result["recipe_identity"] == summary["recipe_identity"]
    assert result["validation"]["validation_complete"]
    assert result["cache_identity"] == cache.identity
    assert result["levels"]["unigram"] == pytest.approx(unigram_level(cache))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[-1]["tokens"] == 3 * 512


def test_another_study_is_not_written_over(study: tuple[Path, Finished], run_module: RunModule, tiny: Path) -> None:
    before = {path: path.read_bytes() for path in study[0].rglob("*") if path.is_file()}
    done = run_module("tinyllm_ray.tune", "--budget", "60s", "--preset", "nano", "--out", study[0], cwd=tiny)
    assert done.status == 2
    assert "already holds a study" in done.output
    assert "--resume" in done.output
    assert {path: path.read_bytes() for path in study[0].rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("neither_torch_nor_ray")
def test_a_resumption_with_another_recipe_is_refused(
    study: tuple[Path, Finished], run_module: RunModule, tiny: Path
) -> None:
    arguments = ("--config", tiny / "recipe.yaml", "--space", tiny / "space.yaml", "--out", study[0], "--resume")
    changed = ("--set", "optimizer.weight_decay=0.3")
    done = run_module("tinyllm_ray.tune", "--budget", "200s", *arguments, *changed, cwd=tiny)
    assert done.status == 2, done.output
    assert "optimizer.weight_decay is 0.3, was 0.1" in done.output


def test_a_resumption_without_budget_left_is_refused_at_once(
    study: tuple[Path, Finished], summary: dict, run_module: RunModule, tiny: Path
) -> None:
    assert summary["elapsed_seconds"] > 5
    arguments = ("--config", tiny / "recipe.yaml", "--space", tiny / "space.yaml", "--out", study[0], "--resume")
    done = run_module("tinyllm_ray.tune", "--budget", "5s", *arguments, cwd=tiny)
    assert done.status == 2, done.output
    assert done.output.startswith("error: --resume: ")
    assert "of the budget of 5s are spent; give a larger --budget" in done.output


def test_ctrl_c_keeps_what_was_measured(interrupted: Interrupted) -> None:
    assert interrupted.records
    assert interrupted.summary["ended"] == "SIGINT"
    assert "running" not in {row["state"] for row in interrupted.summary["candidates"]}
    assert "Ended: SIGINT" in interrupted.files["report.html"]
    assert interrupted.summary["selected"]["candidate"] in {record.candidate for record in interrupted.records}
    assert "ended: SIGINT" in interrupted.said
    assert "next: python -m tinyllm_ray.train --config study/selected.yaml" in interrupted.said
    assert "Traceback" not in interrupted.said


def test_resume_goes_on_and_counts_what_was_used(
    interrupted: Interrupted, study: tuple[Path, Finished], summary: dict, records: list[TrialRecord]
) -> None:
    kept, spent, first_wall = interrupted.records, interrupted.summary["elapsed_seconds"], interrupted.wall_seconds
    assert records[: len(kept)] == kept
    assert len(records) > len(kept)
    assert summary["study"] == interrupted.summary["study"]
    assert spent + 0.5 * study[1].wall_seconds < summary["elapsed_seconds"] <= first_wall + study[1].wall_seconds


MISTAKES = [
    (["--budget", "45"], "--budget: '45' is not a duration"),
    (["--budget", "0s"], "'0s' is zero"),
    (["--budget", "1m", "--preset", "21m"], "'21m'"),
    (["--budget", "1m", "--space", "recipe_space.yaml"], "belongs to the recipe"),
    (["--budget", "1m", "--preset", "nano", "--space", "no_fit.yaml"], "divides the 8 rows of an update"),
    (["--budget", "1m", "--preset", "nano", "--set", "data.cache=tokens"], "set model.vocab_size=65536"),
    (["--budget", "1m", "--out", "full"], "not an empty folder"),
]
OTHER_MISTAKES = [
    (["--budget", "2700"], "like 90s, 45m or 1h30m"),
    (["--budget", "1h30"], "'1h30'"),
    (["--budget", "10H"], "'10H'"),
    (["--budget=-5m"], "'-5m'"),
    (["--budget", "-5m"], "'-5m'"),
    (["--budget", "0"], "'0'"),
    (["--budget", ""], "''"),
    (["--budget", "1m", "--config", "missing.yaml"], "missing.yaml: no such file"),
    (["--budget", "1m", "--preset", "nano", "--set", "training.tokens=1"], "training.tokens: there is no such key"),
    (["--budget", "1m", "--preset", "nano", "--set", "data.cache=nowhere"], "nowhere: no such folder"),
    (["--budget", "1m", "--space", "missing.yaml"], "'missing.yaml'"),
    (["--budget", "1m", "--space", "empty_space.yaml"], "empty space"),
    (["--budget", "1m", "--windows", "0"], "protocol"),
    (["--budget", "1m", "--preset", "nano", "--set", "data.cache=full"], "holds no manifest.json"),
    (["--budget", "1m", "--set", "training.seed=1"], "--set changes a recipe"),
]


@pytest.mark.usefixtures("neither_torch_nor_ray")
@pytest.mark.parametrize(
    ("arguments", "said"), [*MISTAKES, *(pytest.param(*mistake, marks=pytest.mark.slow) for mistake in OTHER_MISTAKES)]
)
def test_a_mistake_is_one_line_and_status_2(
    run_module: RunModule, make_cache: MakeCache, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "recipe_space.yaml").write_text("baseline: {}\nfactors: {tokens_per_update: [1024]}\n")
    (tmp_path / "empty_space.yaml").write_text("baseline: {}\nfactors: {}\n")
    (tmp_path / "no_fit.yaml").write_text("baseline: {micro_batch_size: 8}\nfactors: {micro_batch_size: [3, 5]}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "tokens").symlink_to(make_cache(range(1000)).folder)
    before = sorted(tmp_path.rglob("*"))
    out = [] if "--out" in arguments else ["--out", "study"]
    done = run_module("tinyllm_ray.tune", *arguments, *out, cwd=tmp_path)
    lines = done.output.strip().splitlines()
    assert done.status == 2, done.output
    assert len(lines) == 1, done.output
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_relative_cache_serves_from_anywhere(
    run_module: RunModule, make_cache: MakeCache, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").symlink_to(make_cache([n % 32_000 for n in range(5000)], vocab_size=32_000).folder)
    (tmp_path / "one.yaml").write_text("baseline: {cpu_threads: 1}\nfactors: {micro_batch_size: [8]}\n")
    arguments = ("--config", tiny / "recipe.yaml", "--space", "one.yaml", "--windows", "1", "--updates-per-window", "1")
    asked = ("--budget", "100s", "--set", "data.cache=tokens", "--out", "sp ace")
    done = run_module("tinyllm_ray.tune", *arguments, *asked, cwd=tmp_path)
    assert done.status == 0, done.output
    assert "next: python -m tinyllm_ray.train --config 'sp ace/selected.yaml' --out 'sp ace/run'" in done.output


def test_a_budget_that_is_over_before_the_start_is_said(run_module: RunModule, tmp_path: Path) -> None:
    done = run_module("tinyllm_ray.tune", "--budget", "3s", "--preset", "nano", "--out", "study", cwd=tmp_path)
    assert done.status == 3, done.output
    assert "the budget of 3s ended before anything was measured" in done.output
    assert "give 60s or more" in done.output
    assert "Traceback" not in done.output


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_ctrl_c_at_any_moment_is_one_line_and_status_130(built_root: Path, tmp_path: Path, seconds: float) -> None:
    """While it imports, while Ray starts: some time after the command has begun to listen."""
    command = [sys.executable, "-m", "tinyllm_ray.tune", "--budget", "60s", "--preset", "nano", "--out", "study"]
    environment = os.environ | {CACHE_VARIABLE: str(built_root)}
    study = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not catches(study.pid, signal.SIGTERM):
        assert study.poll() is None, study.communicate()
        time.sleep(0.01)
    time.sleep(seconds)
    study.send_signal(signal.SIGINT)
    _, said = study.communicate(timeout=240)
    assert study.returncode == 130, said
    assert "Traceback" not in said
