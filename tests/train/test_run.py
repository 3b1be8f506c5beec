"""A recipe run to its end, cut, interrupted and gone wrong, and what each leaves."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import subset_batches, validation_batches
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.evaluate import evaluate
from tinyllm_ray.train.progress import Progress
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.run import Progress, Run, prepare_folder
from tinyllm_ray.train.weights import load_weights

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path} holds {name}"))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights_of(out: Path, config: Config) -> Llama:
    model = initialize(config.model, seed=0)
    load_weights(model, out / "model.safetensors")
    return model


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

    def test_its_losses_are_those_of_the_weights_it_left(
        self, complete: Path, short: Config, tiny_cache: TokenCache
    ) -> None:
        result, model = read_json(complete / "result.json"), weights_of(complete, short)
        loss, targets = evaluate(model, validation_batches(tiny_cache, 16, 4), "auto")
        assert result["validation"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert result["validation"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
        assert (result["validation"]["tokens"], result["validation"]["validation_complete"]) == (targets, True)
        assert loss < result["levels"]["unigram"] < result["levels"]["uniform"] + 0.1

        best = read_json(complete / "best.json")
        assert best == result["best"]
        assert best["step"] in (25, 50)
        if best["step"] == 50:
            subset = subset_batches(tiny_cache, 16, 4, blocks=8, seed=12345)
            assert best["loss"] == pytest.approx(evaluate(model, subset, "auto")[0], rel=1e-6)

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
        assert not (tmp_path / "model.safetensors").exists()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_in_order(
        self, short: Config, tiny_cache: TokenCache, tmp_path: Path, number: signal.Signals
    ) -> None:
        before = signal.getsignal(number)

        def interrupt(progress: Progress) -> None:
            if progress.updates >= 20:
                os.kill(os.getpid(), number)

        assert Run(short, tiny_cache, tmp_path, interrupt).execute() == 128 + number
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["signal"]) == ("interrupted", number)
        assert 20 <= result["step"] < 50
        assert result["validation"] is None
        assert metrics_of(tmp_path)[-1]["step"] == result["step"]
        weights_of(tmp_path, short)
        assert signal.getsignal(number) is before

    def test_a_second_signal_ends_it_at_once(self, short: Config, tiny_cache: TokenCache, tmp_path: Path) -> None:
        def interrupt(progress: Progress) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            Run(short, tiny_cache, tmp_path, interrupt).execute()
        assert not (tmp_path / "result.json").exists()


class TestNotFinite:
    """A learning rate that no weights survive."""

    def test_ends_the_run_and_leaves_no_weights(self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path) -> None:
        config = tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0})
        assert Run(config, tiny_cache, tmp_path).execute() == 3
        assert read_json(tmp_path / "result.json")["status"] == "failed"
        assert not (tmp_path / "model.safetensors").exists()
        assert all(math.isfinite(line["loss"]) for line in metrics_of(tmp_path))

    def test_shows_where_the_last_update_broke_the_weights(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """Loss and gradient of an update are those before it."""
        config = tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0, "max_updates": 1})
        assert Run(config, tiny_cache, tmp_path).execute() == 3
        result = read_json(tmp_path / "result.json")
        assert (result["status"], result["best"], result["validation"]) == ("failed", None, None)
        assert not (tmp_path / "model.safetensors").exists()


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

    def test_a_budget_larger_than_the_cache_is_said(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--config", file, "--set", "training.token_budget=12800", "--out", str(tmp_path / "run")]) == 0
        assert "the run's 12,800 targets pass 2.1 times over the 6,000 training tokens of" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--config", "30m"], "30m"),
            (["--set", "training.max_updates=0"], "training.max_updates"),
            (["--set", "data.cache=/nowhere"], "/nowhere"),
            (["--out", "/proc/run"], "--out /proc/run"),
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
