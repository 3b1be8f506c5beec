"""A recipe run to its end, cut, interrupted and gone wrong, and what each leaves."""

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metrics_of, read_json, weights_of
from small_caches import write_cache

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import subset_batches, validation_batches
from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.measure.flops import flop_per_target
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.checkpoints import find_checkpoint
from tinyllm_ray.train.evaluate import Evaluator
from tinyllm_ray.train.folder import prepare_folder
from tinyllm_ray.train.progress import Event, Progress
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.run import Run

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")


@pytest.fixture(scope="module")
def short(tiny: MakeConfig) -> Config:
    """50 updates in 2 epochs."""
    return tiny(training={"token_budget": 50 * 128, "epochs": 2})


@pytest.fixture(scope="module")
def complete(short: Config, tiny_cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that came to its end."""
    out = tmp_path_factory.mktemp("complete")
    assert Run(short, tiny_cache, out).execute() == 0
    return out


class TestComplete:
    def test_leaves_its_configuration_and_environment(self, complete: Path, short: Config) -> None:
        assert load(complete / "config.yaml") == short
        assert read_json(complete / "environment.json")["versions"]["torch"] == torch.__version__

    def test_has_a_line_for_every_update(self, complete: Path, short: Config) -> None:
        lines = metrics_of(complete)
        assert [line["step"] for line in lines] == list(range(1, 51))
        assert [line["tokens"] for line in lines] == [128 * step for step in range(1, 51)]
        assert [line["lr"] for line in lines] == [learning_rate(short, update) for update in range(50)]
        assert all(line["tokens_per_second"] > 0 for line in lines)
        seconds = [line["training_seconds"] for line in lines]
        assert seconds == sorted(seconds)
        assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]

    def test_the_result_says_what_was_trained(self, complete: Path, short: Config, tiny_cache: TokenCache) -> None:
        result = read_json(complete / "result.json")
        assert (result["status"], result["signal"]) == ("complete", None)
        assert (result["step"], result["tokens"], result["epochs"]) == (50, 6400, 2)
        assert result["parameters"] == short.model.parameters
        assert result["recipe_identity"] == short.recipe_identity
        assert result["cache_identity"] == tiny_cache.identity
        assert 0 < result["training_seconds"] <= result["training_elapsed_seconds"]
        assert result["training_tokens_per_second"] >= result["elapsed_tokens_per_second"]
        stages = result["start_seconds"]
        assert list(stages)[-1] == "first_update"
        assert result["entry_to_first_update_seconds"] == pytest.approx(sum(stages.values()))
        assert result["model_flops_per_second"] == pytest.approx(
            result["training_tokens_per_second"] * flop_per_target(short.model)
        )
        assert result["model_flops_share_of_peak"] is None  # a CPU's peak is not known

    def test_its_losses_are_those_of_the_weights_it_left(
        self, complete: Path, short: Config, tiny_cache: TokenCache
    ) -> None:
        result, model = read_json(complete / "result.json"), weights_of(complete, short)
        evaluator = Evaluator(model, short, torch.device("cpu"))
        loss, targets = evaluator.evaluate(validation_batches(tiny_cache, 16, 4))
        assert result["validation"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert result["validation"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
        assert (result["validation"]["tokens"], result["validation"]["validation_complete"]) == (targets, True)
        assert loss < result["levels"]["unigram"] < result["levels"]["uniform"] + 0.1

        best = read_json(complete / "best.json")
        assert best == result["best"]
        assert best["step"] in (25, 50)
        if best["step"] == 50:
            subset = subset_batches(tiny_cache, 16, 4, blocks=8, seed=12345)
            assert best["loss"] == pytest.approx(evaluator.evaluate(subset)[0], rel=1e-6)

    def test_another_execution_learns_the_same(
        self, complete: Path, short: Config, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        other = short.with_execution({"micro_batch_size": 2, "sdpa_backend": "math", "prefetch_depth": 0})
        assert Run(other, tiny_cache, tmp_path).execute() == 0
        expected = [line["loss"] for line in metrics_of(complete)]
        assert [line["loss"] for line in metrics_of(tmp_path)] == pytest.approx(expected, rel=1e-3)
        found, wanted = read_json(tmp_path / "result.json"), read_json(complete / "result.json")
        assert found["validation"]["loss"] == pytest.approx(wanted["validation"]["loss"], rel=1e-3)
        assert found["recipe_identity"] == wanted["recipe_identity"]


class TestCut:
    def test_max_updates_ends_it_on_the_way(
        self, complete: Path, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        config = tiny(training={"token_budget": 50 * 128, "epochs": 2, "max_updates": 7})
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        assert metrics_of(tmp_path)[-1]["step"] == 7
        assert [line["loss"] for line in metrics_of(tmp_path)] == [line["loss"] for line in metrics_of(complete)[:7]]
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["step"]) == ("complete", 7)
        assert result["best"]["step"] == 7

    def test_without_a_checkpoint_when_none_is_wanted(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        config = tiny(training={"max_updates": 1}, output={"checkpoint": "none"})
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        assert not (tmp_path / "checkpoints").exists()


class TestNotFinite:
    """A learning rate that no weights survive."""

    def test_ends_the_run_with_the_weights_from_before(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        config = tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0})
        assert Run(config, tiny_cache, tmp_path).execute() == 3
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["validation"]) == ("failed", None)
        assert result["fault"]["update"] == result["step"] + 1
        assert "micro-batch" in result["fault"]["where"]
        lines = metrics_of(tmp_path)
        assert lines[-1]["step"] == result["step"]
        assert all(math.isfinite(line["loss"]) for line in lines)
        model = weights_of(tmp_path, config)
        assert all(weight.isfinite().all() for weight in model.parameters())
        assert find_checkpoint(tmp_path).step == result["step"]

    def test_shows_where_the_last_update_broke_the_weights(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """Loss and gradient of an update are those before it."""
        config = tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0, "max_updates": 1})
        assert Run(config, tiny_cache, tmp_path).execute() == 3
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["best"], result["validation"]) == ("failed", None, None)
        assert result["fault"]["update"] == 1
        assert not (tmp_path / "checkpoints").exists()


class TestLargeLoss:
    def test_has_no_perplexity_and_is_no_error(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Evaluator, "evaluate", lambda self, batches: (4875.0, 999))
        assert Run(tiny(training={"max_updates": 1}), tiny_cache, tmp_path).execute() == 0
        validation = read_json(tmp_path / "result.json")["validation"]
        assert (validation["loss"], validation["perplexity"]) == (4875.0, None)


class TestWritesThatFail:
    """Neither the run nor what was written before comes to harm."""

    def test_checkpoints_that_cannot_be_written(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "checkpoints").write_text("a file where the folder should be")
        config = tiny(training={"max_updates": 9}, output={"checkpoint": "interval", "checkpoint_interval": 4})
        with pytest.raises(TinyllmRayError, match="the last checkpoint could not be written"):
            Run(config, tiny_cache, tmp_path).execute()
        assert capsys.readouterr().err.count("training goes on") == 3
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["step"], result["failed_checkpoints"]) == ("complete", 9, 3)
        assert len(metrics_of(tmp_path)) == 9

    def test_a_folder_that_is_gone(self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path) -> None:
        out = tmp_path / "run"
        out.mkdir()
        seen = []

        def remove(event: Event) -> None:
            if isinstance(event, Progress):
                seen.append(event.updates)
            if seen and seen[-1] >= 20:
                shutil.rmtree(out, ignore_errors=True)

        run = Run(tiny(training={"max_updates": 60}), tiny_cache, out, on_progress=remove)
        with pytest.raises(TinyllmRayError, match="could not be written"):
            run.execute()
        assert seen[-1] == 60

    def test_a_folder_that_is_gone_for_a_while_gets_every_line(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        out, away = tmp_path / "run", tmp_path / "away"
        out.mkdir()

        def move(event: Event) -> None:
            updates = event.updates if isinstance(event, Progress) else 0
            if 20 <= updates < 40 and out.exists():
                out.rename(away)
            if updates >= 40 and away.exists():
                away.rename(out)

        config = tiny(training={"max_updates": 60, "epochs": 1})
        assert Run(config, tiny_cache, out, on_progress=move).execute() == 0
        assert [line["step"] for line in metrics_of(out)] == list(range(1, 61))


class TestFolder:
    def test_is_made_with_its_parents(self, tmp_path: Path) -> None:
        prepare_folder(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
        prepare_folder(tmp_path / "a" / "b")

    def test_that_holds_something_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "kept").write_text("")
        with pytest.raises(ConfigError, match="not empty"):
            prepare_folder(tmp_path)

    def test_that_is_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="--out"):
            prepare_folder(tmp_path / "file")


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def _environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(name, "")  # so that what the program sets is undone
        monkeypatch.setenv("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path / "compile"))

    @pytest.fixture
    def file(self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(tiny(data={"cache": str(tiny_cache.folder)}).to_yaml())
        return str(path)

    def test_trains_and_says_where_the_result_is(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert main(["--config", file, "--set", "training.max_updates=3", "--out", str(out)]) == 0
        printed = capsys.readouterr()
        assert str(out / "result.json") in printed.out
        assert "update 3/3" in printed.err
        assert "over the" not in printed.err
        assert read_json(out / "result.json")["step"] == 3
        assert load(out / "config.yaml") == load(file, ["training.max_updates=3"])

    def test_without_a_cache_named_it_is_the_default_one(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "recipe.yaml").write_text(tiny().to_yaml())
        monkeypatch.setattr("tinyllm_ray.data.prepare.default_cache", lambda: tiny_cache.folder)
        arguments = ["--config", str(tmp_path / "recipe.yaml"), "--set", "training.max_updates=1"]
        assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
        assert read_json(tmp_path / "run" / "result.json")["cache_identity"] == tiny_cache.identity

    def test_a_budget_larger_than_the_cache_is_said(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--config", file, "--set", "training.token_budget=12800", "--out", str(tmp_path / "run")]) == 0
        assert "the run's 12,800 targets pass 2.1 times over the 6,000 training tokens of" in capsys.readouterr().err

    def test_a_command_that_is_none_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["evalute", "runs/first"])
        assert ended.value.code == 2
        assert "there is no command 'evalute', but evaluate, export, import" in capsys.readouterr().err

    def test_a_split_without_a_row_is_found_before_anything_is_written(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small = write_cache(tmp_path / "small", {"train": [1] * 1000, "validation": [1] * 9}, 1000, vocab_size=61)
        out = tmp_path / "run"
        assert main(["--config", file, "--set", f"data.cache={small.folder}", "--out", str(out)]) == 2
        assert "9 validation tokens, not a row of model.context 16" in capsys.readouterr().err
        assert not out.exists()

    def test_memory_that_does_not_suffice_is_one_line_and_status_2(
        self,
        file: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        caplog.set_level(logging.INFO)  # as train.log has it
        monkeypatch.setattr(Run, "_update_first", lambda self, trainer: torch.empty(2**60))
        out = tmp_path / "run"
        assert main(["--config", file, "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.splitlines()[-1].startswith("error: out of memory (")
        assert "lower execution.micro_batch_size, 4 here" in said
        assert read_json(out / "result.json")["status"] == "failed"
        assert "torch.empty(2**60)" in caplog.text, "where it was missing is in the log"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--config", "30m"], "30m"),
            (["--set", "training.max_updates=0"], "training.max_updates"),
            (["--set", "data.cache=/nowhere"], "/nowhere"),
            (["--out", "/proc/run"], "--out /proc/run"),
            (["--stop-at", "0"], "--stop-at 0"),
            (["--set", "output.checkpoint=explicit", "--set", "output.checkpoint_updates=[9, 101]"], "101 is beyond"),
            (["--resume", "x" * 300], "longer than a file's may be"),
        ],
    )
    def test_a_mistake_is_one_line_and_status_2(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        out = tmp_path / "run"
        assert main(["--config", file, "--out", str(out), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert words in line
        assert not out.exists()
