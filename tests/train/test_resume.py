"""A run that was interrupted, wherever that was, ends as the one that was not."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_layer import one_layer
from runs import learned, lines_of, metrics_of, read_json

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.checkpoints import find_checkpoint
from tinyllm_ray.train.folder import begin_result, leave_before_start, lock_folder, prepare_folder
from tinyllm_ray.train.interruption import Interruption
from tinyllm_ray.train.progress import Event, Progress, Starting
from tinyllm_ray.train.run import Run
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="bits are promised on the CPU")

EPOCH = 12
"""Updates of an epoch here; the run has four, and its tokens last for 46 updates."""


@pytest.fixture(scope="module")
def recipe(tiny: MakeConfig, tiny_cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tiny(
        training={"token_budget": 4 * EPOCH * 128, "epochs": 4},
        execution={"deterministic": True},
        data={"cache": str(tiny_cache.folder)},
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(config.to_yaml())
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path_factory.mktemp("compile")))


def killed(*_: object) -> None:
    """Leaves a folder as it is, which a signal's own handling would not."""
    raise KeyboardInterrupt


def train(recipe: str, out: Path, *arguments: str) -> int:
    return main(["--config", recipe, "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def unbroken(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(recipe, out) == 0
    return out


class TestBits:
    @pytest.mark.parametrize("stop", [1, 2, 6, EPOCH - 1, EPOCH, EPOCH + 1, 3 * EPOCH, 4 * EPOCH - 1, 4 * EPOCH])
    def test_stopped_in_any_phase_of_an_epoch_and_resumed(
        self, recipe: str, unbroken: Path, tmp_path: Path, stop: int
    ) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", str(stop)) == 0
        if stop < 4 * EPOCH:
            result = read_json(out / "result.json")
            assert (result["status"], result["step"], result["signal"]) == ("interrupted", stop, None)
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)

    def test_stopped_after_every_few_updates(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        for stop in range(7, 49, 7):
            assert train(recipe, out, "--resume", "--stop-at", str(stop)) == 0
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)
        result = read_json(out / "result.json")
        assert result["sessions"] == 7
        # every session's first update, which starts and compiles, counts for no throughput
        assert result["seconds_this_session"] < result["training_elapsed_seconds"]

    def test_gone_on_with_in_another_folder(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        assert train(recipe, first, "--stop-at", "20") == 0
        before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
        assert train(recipe, second, "--resume", str(first)) == 0
        assert learned(second) == learned(unbroken)
        assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before

    def test_an_older_checkpoint_leaves_the_later_lines_aside(
        self, recipe: str, unbroken: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        every = ("--set", "output.checkpoint=interval", "--set", "output.checkpoint_interval=10")
        assert train(recipe, out, *every, "--stop-at", "25") == 0
        shutil.rmtree(out / "checkpoints" / "step-00000025")
        assert train(recipe, out, *every, "--resume") == 0
        assert learned(out) == learned(unbroken)
        assert [line["step"] for line in lines_of(out / "metrics.superseded.jsonl")] == [21, 22, 23, 24, 25]

    def test_interrupted_before_an_epochs_evaluation_was_made(
        self, recipe: str, unbroken: Path, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """While its last update was under way."""
        out, interruption = tmp_path / "run", Interruption()

        def on_progress(event: Event) -> None:
            if isinstance(event, Progress) and event.updates == EPOCH:
                interruption.number = signal.SIGTERM

        prepare_folder(out)
        run = Run(load(recipe), tiny_cache, out, interruption=interruption, on_progress=on_progress)
        assert run.execute() == 143
        assert not (out / "evaluations.jsonl").exists()

        def fail(event: Event) -> None:
            if isinstance(event, Starting):
                raise OSError("the node went away")

        checkpoint = find_checkpoint(out)
        assert checkpoint.step == EPOCH
        with pytest.raises(OSError, match="went away"):
            Run(load(recipe), tiny_cache, out, checkpoint=checkpoint, on_progress=fail).execute()
        assert len(lines_of(out / "evaluations.jsonl")) == 1  # and once, though its checkpoint knows nothing of it
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)

    def test_killed_and_resumed(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        """By SIGKILL, at whatever it was doing some time after its first checkpoint."""
        out = tmp_path / "run"
        every = ("--set", "output.checkpoint=interval", "--set", "output.checkpoint_interval=3")
        command = [sys.executable, "-m", "tinyllm_ray.train", "--config", recipe, "--out", str(out), *every]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (out / "checkpoints" / "step-00000006").exists():
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert train(recipe, out, *every, "--resume") == 0
        assert learned(out) == learned(unbroken)


class TestWhatMayDiffer:
    def test_execution_output_and_bound(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--set", "training.max_updates=10") == 0
        other = ("execution.micro_batch_size=2", "execution.sdpa_backend=math", "output.keep_checkpoints=1")
        assert train(recipe, out, "--resume", *(word for setting in other for word in ("--set", setting))) == 0
        assert read_json(out / "result.json")["step"] == 48
        assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000048"]
        losses = [line["loss"] for line in metrics_of(out)]
        assert losses == pytest.approx([line["loss"] for line in metrics_of(unbroken)], rel=1e-3)

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            (["optimizer.weight_decay=0.2"], ["optimizer.weight_decay"]),
            (["training.seed=7", "model.layers=2"], ["training.seed", "model.layers"]),
        ],
    )
    def test_another_recipe_is_refused_by_its_fields(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], named: list[str]
    ) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "2") == 0
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert train(recipe, out, "--resume", *(word for setting in settings for word in ("--set", setting))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(name in line for name in named)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


class TestCommand:
    def test_without_resume_a_run_is_left_alone(
        self, recipe: str, unbroken: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = (unbroken / "result.json").read_bytes()
        assert train(recipe, unbroken) == 2
        assert "--resume" in capsys.readouterr().err
        assert (unbroken / "result.json").read_bytes() == before

    def test_a_complete_run_is_complete(self, recipe: str, unbroken: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = (unbroken / "result.json").read_bytes()
        assert train(recipe, unbroken, "--resume") == 0
        assert "is complete: 48 updates" in capsys.readouterr().out
        assert (unbroken / "result.json").read_bytes() == before

    def test_resume_starts_where_there_is_nothing(
        self, recipe: str, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--resume", "--stop-at", "1") == 0
        assert "begins from the start" in capsys.readouterr().err

    def test_the_configuration_may_come_from_the_folder(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "30") == 0
        assert main(["--out", str(out), "--resume"]) == 0
        assert learned(out) == learned(unbroken)

    def test_an_older_checkpoint_of_the_same_folder_is_refused(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        every = ("--set", "output.checkpoint=interval", "--set", "output.checkpoint_interval=2")
        assert train(recipe, out, *every, "--stop-at", "4") == 0
        assert train(recipe, out, "--resume", str(out / "checkpoints" / "step-00000002")) == 2
        assert "later checkpoint, of update 4" in capsys.readouterr().err
        assert train(recipe, out, "--resume", str(out / "checkpoints" / "step-00000004"), "--stop-at", "5") == 0

    def test_resuming_from_nothing_is_refused(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train(recipe, tmp_path / "run", "--resume", str(tmp_path / "absent")) == 2
        assert str(tmp_path / "absent") in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        assert main(["--out", str(tmp_path / "run"), "--resume"]) == 2
        assert "--config is missing" in capsys.readouterr().err

    def test_without_checkpoints_it_begins_again_and_loses_no_line(self, recipe: str, tmp_path: Path) -> None:
        out, none = tmp_path / "run", ("--set", "output.checkpoint=none")
        assert train(recipe, out, *none, "--stop-at", "5") == 0
        assert not (out / "checkpoints").exists()
        assert train(recipe, out, *none, "--resume", "--stop-at", "3") == 0
        assert [line["step"] for line in metrics_of(out)] == [1, 2, 3]
        assert [line["step"] for line in lines_of(out / "metrics.superseded.jsonl")] == [1, 2, 3, 4, 5]


def test_a_damaged_newest_checkpoint_is_passed_over(
    recipe: str, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    every = ("--set", "output.checkpoint=interval", "--set", "output.checkpoint_interval=10")
    assert train(recipe, out, *every, "--stop-at", "25") == 0
    with (out / "checkpoints" / "step-00000025" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert find_checkpoint(out).step == 20
    assert train(recipe, out, *every, "--resume") == 0
    assert learned(out) == learned(unbroken)


def test_a_run_without_any_intact_checkpoint_is_refused(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(recipe, out, "--stop-at", "2") == 0
    (out / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError):
        find_checkpoint(out)
    assert train(recipe, out, "--resume") == 2


class TestCameToHarm:
    """What a cluster does to a run's folder, and what becomes of the run."""

    def test_killed_before_its_first_checkpoint_was_whole(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "2") == 0
        (out / "checkpoints" / "step-00000002").rename(out / "checkpoints" / ".step-00000002.writing-0123456789abcdef")
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)

    def test_a_last_checkpoint_that_was_not_written_is_written_then(
        self, recipe: str, unbroken: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "30") == 0
        (out / "checkpoints").rename(out / "kept")
        (out / "checkpoints").write_text("no folder")
        shutil.copytree(out / "kept", tmp_path / "other" / "checkpoints")
        assert train(recipe, out, "--resume", str(tmp_path / "other")) == 1
        (out / "checkpoints").unlink()
        (out / "kept").rename(out / "checkpoints")
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)

    def test_two_at_a_time_are_one_too_many(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "2") == 0
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "train.log"}
        with lock_folder(out):
            assert train(recipe, out, "--resume") == 2
        assert "another process trains in this folder" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in before} == before

    def test_a_damaged_curve_is_kept_and_the_run_goes_on(self, recipe: str, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert train(recipe, out, "--stop-at", "20") == 0
        whole = (out / "metrics.jsonl").read_text().splitlines()
        damaged = "\n".join([*whole[:5], '{"step": 6, "lo', *whole[6:], whole[3], "{}", '{"step": 21, "torn'])
        (out / "metrics.jsonl").write_text(damaged)
        assert train(recipe, out, "--resume") == 0
        assert (out / "metrics.damaged.jsonl").read_text() == damaged
        assert [line["step"] for line in metrics_of(out)] == [1, 2, 3, 4, 5, *range(7, 49)]
        assert find_checkpoint(out).step == 48

    def test_an_error_on_the_way_leaves_a_checkpoint_and_its_reason(
        self, recipe: str, unbroken: Path, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, steps = tmp_path / "run", []

        def step(trainer: Trainer) -> Statistics:
            steps.append(trainer.updates)
            if trainer.updates == 15:
                raise OSError("the file system went away")
            return step_before(trainer)

        step_before = Trainer.step
        monkeypatch.setattr(Trainer, "step", step)
        with pytest.raises(OSError, match="went away"):
            train(recipe, out)
        monkeypatch.undo()
        result = read_json(out / "result.json")
        assert (result["status"], result["step"]) == ("failed", 15)
        assert result["fault"]["where"] == "OSError: the file system went away"
        assert find_checkpoint(out).step == 15
        assert train(recipe, out, "--resume") == 0
        assert learned(out) == learned(unbroken)

    def test_a_result_says_while_the_run_is_under_way(
        self, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def step(trainer: Trainer) -> Statistics:
            seen.append(read_json(tmp_path / "run" / "result.json"))
            return step_before(trainer)

        step_before = Trainer.step
        monkeypatch.setattr(Trainer, "step", step)
        assert train(recipe, tmp_path / "run", "--stop-at", "1") == 0
        assert (seen[0]["status"], seen[0]["pid"]) == ("running", os.getpid())
        assert "pid" not in read_json(tmp_path / "run" / "result.json")


class TestFolders:
    def test_a_configuration_alone_is_no_run(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "mine"
        out.mkdir()
        (out / "config.yaml").write_text("# by hand\npreset: nano\n")
        assert train(recipe, out, "--resume") == 2
        assert "holds no run" in capsys.readouterr().err
        assert (out / "config.yaml").read_text() == "# by hand\npreset: nano\n"

    def test_one_without_an_update_counts_as_empty(self, recipe: str, tmp_path: Path) -> None:
        out = tmp_path / "run"
        leave_before_start(out, False, 15)
        assert read_json(out / "result.json")["status"] == "interrupted"
        (out / "train.log").write_text("")
        assert train(recipe, out, "--stop-at", "1") == 0

    @pytest.mark.parametrize("renames", range(3))
    def test_one_whose_session_was_killed_as_it_began_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
    ) -> None:
        """Before each file that a session begins with took its name, and after the last."""
        out, left = tmp_path / "run", [renames]

        def replace(path: Path, target: Path) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replace_before(path, target)

        replace_before = Path.replace
        prepare_folder(out)
        with monkeypatch.context() as context:
            context.setattr(Path, "replace", replace)
            context.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # the dead remove nothing
            with contextlib.suppress(KeyboardInterrupt):
                begin_result(out, "preset: nano\n")
        assert len(list(out.iterdir())) == min(renames + 1, 2)
        prepare_folder(out)
        prepare_folder(out, resume=True)

    def test_a_run_that_is_complete_stays_so_where_a_signal_comes_first(self, unbroken: Path) -> None:
        before = (unbroken / "result.json").read_bytes()
        leave_before_start(unbroken, True, 15)
        assert (unbroken / "result.json").read_bytes() == before

    def test_another_recipe_is_refused_without_checkpoints_too(
        self, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, none = tmp_path / "run", ("--set", "output.checkpoint=none")
        assert train(recipe, out, *none, "--stop-at", "5") == 0
        assert train(recipe, out, *none, "--resume", "--set", "optimizer.weight_decay=0.3") == 2
        assert "optimizer.weight_decay 0.1, asked 0.3" in capsys.readouterr().err
        assert len(metrics_of(out)) == 5

    def test_what_a_job_made_since_is_in_its_own_folder(
        self, recipe: str, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same command again, with another run's checkpoint to begin from."""
        first, out = tmp_path / "first", tmp_path / "out"
        assert train(recipe, first, "--stop-at", "10") == 0
        command = (recipe, out, "--resume", str(first))
        assert train(*command, "--stop-at", "30") == 0
        assert train(*command, "--stop-at", "40") == 0
        assert f"goes on from {out}" in capsys.readouterr().err
        assert train(*command) == 0
        assert learned(out) == learned(unbroken)

    def test_a_session_in_another_folder_that_was_killed_as_it_began_is_gone_on_with(
        self, recipe: str, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, out = tmp_path / "first", tmp_path / "out"
        assert train(recipe, first, "--stop-at", "10") == 0
        with monkeypatch.context() as context:
            context.setattr("tinyllm_ray.train.ahead.import_compiler", killed)
            assert train(recipe, out, "--resume", str(first)) == 130
        assert train(recipe, out, "--resume", str(first)) == 0
        assert learned(out) == learned(unbroken)

    def test_paths_may_be_relative_and_linked(
        self, recipe: str, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = tmp_path / "first"
        assert train(recipe, first, "--stop-at", "10") == 0
        monkeypatch.chdir(first / "checkpoints")
        (tmp_path / "latest").symlink_to(first / "checkpoints" / "step-00000010")
        assert train(recipe, Path("../../relative"), "--resume", "step-00000010") == 0
        assert train(recipe, Path("../../linked"), "--resume", "../../latest") == 0
        assert learned(tmp_path / "relative") == learned(tmp_path / "linked") == learned(unbroken)

    def test_the_best_is_the_best_so_far(self, recipe: str, tmp_path: Path) -> None:
        out, every = tmp_path / "run", ("output.checkpoint=interval", "output.checkpoint_interval=12")
        settings = [word for setting in every for word in ("--set", setting)]
        assert train(recipe, out, *settings, "--set", "output.keep_checkpoints=null") == 0
        for step in (24, 36, 48):
            shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
        assert train(recipe, out, *settings, "--resume", "--set", "training.max_updates=13", "--stop-at", "12") == 0
        assert read_json(out / "best.json") == read_json(out / "result.json")["best"]
