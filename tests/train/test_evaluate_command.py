"""`python -m tinyllm_ray.train evaluate`: any weights, on the subset or a whole split."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import PackedTraining
from runs import read_json
from small_caches import write_cache

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.evaluate import Evaluator
from tinyllm_ray.train.run import Run
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")


@pytest.fixture(scope="module")
def config(tiny: MakeConfig, tiny_cache: TokenCache) -> Config:
    return tiny(
        training={"token_budget": 20 * 128, "epochs": 2},
        data={"cache": str(tiny_cache.folder)},
        output={"checkpoint": "interval", "checkpoint_interval": 10},
    )


@pytest.fixture(scope="module")
def run(config: Config, tiny_cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert Run(config, tiny_cache, out).execute() == 0
    return out


@pytest.fixture(autouse=True)
def _compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that what the program sets is undone
    monkeypatch.setenv("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path / "compile"))


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["evaluate", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["evaluate", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert printed.out == ""
    return line


def test_a_run_gives_the_loss_that_it_ended_with(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, run)
    expected = read_json(run / "result.json")["validation"]
    assert found["loss"] == expected["loss"]
    assert (found["step"], found["tokens"], found["validation_complete"]) == (20, expected["tokens"], True)


def test_memory_that_does_not_suffice_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluator, "evaluate", lambda self, batches: torch.empty(2**60))
    line = refusal(capsys, run)
    assert line.startswith("error: out of memory (")
    assert "lower evaluation_execution.micro_batch_size" in line


def test_a_checkpoint_on_the_subset_gives_its_epochs_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    found = evaluate(capsys, run / "checkpoints" / "step-00000010", "--subset")
    assert found["loss"] == lines[0]["loss"]
    assert (found["step"], found["tokens"], found["validation_complete"]) == (10, lines[0]["targets"], False)


def test_another_execution_finds_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = evaluate(capsys, run)["loss"]
    settings = ["--set", "evaluation_execution.micro_batch_size=7", "--set", "execution.sdpa_backend=math"]
    assert evaluate(capsys, run, *settings)["loss"] == pytest.approx(loss, rel=1e-6)


def test_what_needs_a_gpu_is_no_part_of_an_evaluation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = evaluate(capsys, run)["loss"]
    values = ("update=graph", "loss_kernel=triton", "optimizer_kernel=triton", "residual_dtype=bfloat16")
    settings = [word for value in values for word in ("--set", f"execution.{value}")]
    assert evaluate(capsys, run, *settings)["loss"] == loss
    line = refusal(capsys, run, *settings, "--set", "execution.sdpa_backend=cudnn")
    assert "execution.sdpa_backend: 'cudnn' (a CPU has auto, flash, math) needs a GPU, and there is none" in line


def test_another_split(run: Path, tiny_cache: TokenCache, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, run, "--split", "train")
    assert (found["split"], found["tokens"]) == ("train", tiny_cache.tokens("train") - 1)


def test_a_file_of_weights_with_a_configuration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = find_checkpoint(run).path / "model.safetensors"
    loss = evaluate(capsys, run)["loss"]
    assert evaluate(capsys, weights, "--config", run / "config.yaml")["loss"] == loss


def test_one_of_packed_models(
    config: Config, tiny_cache: TokenCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = PackedTraining(config)
    path = save_checkpoint(tmp_path, 3, trained.model, trained.optimizer, {}, config, tiny_cache.identity)
    assert f"choose one of its 3 workers, {path}/workers/00 to" in refusal(capsys, tmp_path)
    save_weights(trained.model.workers()[2], tmp_path / "alone.safetensors")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    expected = evaluate(capsys, tmp_path / "alone.safetensors", "--config", tmp_path / "config.yaml")
    found = evaluate(capsys, path / "workers" / "02")
    assert (found["loss"], found["step"]) == (expected["loss"], 3)
    assert found["weights"] == str(path / "workers/02/model.safetensors")


def test_what_was_exported_and_imported_loses_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "exported")]) == 0
    assert main(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "imported")]) == 0
    loss = evaluate_quietly(capsys, run)
    assert evaluate_quietly(capsys, tmp_path / "imported", "--config", run / "config.yaml") == loss


def evaluate_quietly(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> float:
    capsys.readouterr()
    loss: float = evaluate(capsys, *arguments)["loss"]
    return loss


def test_mistakes_are_one_line(
    run: Path, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: MakeConfig
) -> None:
    weights = find_checkpoint(run).path / "model.safetensors"
    assert "no folder" in refusal(capsys, tmp_path / "absent")
    assert "--config" in refusal(capsys, weights)
    assert "no such key" in refusal(capsys, run, "--set", "evaluation.subset_block=3")
    assert "elsewhere" in refusal(capsys, run, "--split", "elsewhere")
    assert "another model" in refusal(capsys, weights, "--config", "nano", "--set", f"data.cache={config.data.cache}")
    other = tmp_path / "other.yaml"
    other.write_text(tiny(model={"layers": 1}, data={"cache": config.data.cache}).to_yaml())
    assert "its model is another" in refusal(capsys, run, "--config", other)
    more = write_cache(tmp_path / "more", {"train": [1] * 100, "validation": [1] * 100}, 1000, vocab_size=99)
    assert "holds ids up to 98" in refusal(capsys, run, "--set", f"data.cache={more.folder}")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(weights.read_bytes()[:100])
    assert "damaged" in refusal(capsys, damaged, "--config", run / "config.yaml")
