"""The real command under real signals, at every moment a run has."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, Signals

import numpy as np
import pytest
import torch
from linux_processes import catches
from runs import lines_of, metrics_of, read_json
from small_caches import write_cache

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.train.checkpoints import find_checkpoint

MakeConfig = Callable[..., Config]
Reached = Callable[[subprocess.Popen[str], Path], bool]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is through with these before they are signalled"),
]


@pytest.fixture(scope="module")
def long_validation(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Minutes of validation after a training of moments."""
    generator = np.random.default_rng(0)
    splits = {"train": generator.integers(61, size=6000), "validation": generator.integers(61, size=4_000_000)}
    tokens = {split: list(map(int, values)) for split, values in splits.items()}
    return write_cache(tmp_path_factory.mktemp("long"), tokens, shard_tokens=1_000_000, vocab_size=61)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def start(config: Config, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> subprocess.Popen[str]:
    monkeypatch.setenv("TINYLLM_RAY_COMPILE_CACHE", str(out.parent / "compile"))
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(config.to_yaml())
    command = [sys.executable, "-m", "tinyllm_ray.train", "--config", str(recipe), "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], number: Signals) -> tuple[int, str]:
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert "Traceback" not in errors
    return process.returncode, errors


def wait(process: subprocess.Popen[str], out: Path, reached: Reached) -> None:
    while not reached(process, out):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def heard(process: subprocess.Popen[str], out: Path) -> bool:
    return catches(process.pid, SIGUSR1)  # Python itself does not


def importing(process: subprocess.Popen[str], out: Path) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()


def training(process: subprocess.Popen[str], out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and len(metrics_of(out)) > 30


def validating(process: subprocess.Popen[str], out: Path) -> bool:
    return (out / "evaluations.jsonl").exists() and len(lines_of(out / "evaluations.jsonl")) == 1


@pytest.mark.parametrize("reached", [heard, importing])
def test_before_the_start(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch, reached: Reached
) -> None:
    process = start(tiny(data={"cache": str(tiny_cache.folder)}), out, monkeypatch)
    wait(process, out, reached)
    assert end(process, SIGTERM) == (143, "ended by SIGTERM\n")
    result = read_json(out / "result.json")
    assert (result["status"], result["signal"], result["step"]) == ("interrupted", SIGTERM, 0)


def test_before_the_start_a_folder_of_somebody_else_stays_as_it_is(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("")
    process = start(tiny(data={"cache": str(tiny_cache.folder)}), out, monkeypatch)
    wait(process, out, heard)
    assert end(process, SIGINT)[0] == 130
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("number", "status"), [(SIGINT, 130), (SIGUSR1, 143)])
def test_in_training(
    tiny: MakeConfig,
    tiny_cache: TokenCache,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: Signals,
    status: int,
) -> None:
    config = tiny(training={"token_budget": 128 * 10**6}, data={"cache": str(tiny_cache.folder)})
    process = start(config, out, monkeypatch)
    wait(process, out, training)
    returned, errors = end(process, number)
    assert returned == status
    assert f"{number.name}: ending after the update in flight" in errors
    result = read_json(out / "result.json")
    assert (result["status"], result["signal"], result["validation"]) == ("interrupted", number, None)
    assert result["step"] == metrics_of(out)[-1]["step"] == find_checkpoint(out).step > 30


def test_in_validation(
    tiny: MakeConfig, long_validation: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is done, and so is its checkpoint: going on means validating."""
    config = tiny(training={"max_updates": 3}, data={"cache": str(long_validation.folder)})
    process = start(config, out, monkeypatch)
    wait(process, out, validating)
    assert end(process, SIGTERM)[0] == 143
    result = read_json(out / "result.json")
    assert (result["status"], result["step"], result["validation"]) == ("interrupted", 3, None)
    assert find_checkpoint(out).step == 3
    log = (out / "train.log").read_text()
    assert "first update after" in log
    assert all(stage in log for stage in ("imports", "cache_checks", "model_and_optimizer", "loader", "first_update"))


def test_in_compilation(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    """At once, although the compiler works for seconds: nothing was trained yet that would be lost."""

    def compiling(process: subprocess.Popen[str], out: Path) -> bool:
        return any((out.parent / "compile").rglob("*.cpp"))

    process = start(tiny(execution={"update": "compiled"}, data={"cache": str(tiny_cache.folder)}), out, monkeypatch)
    wait(process, out, compiling)
    assert end(process, SIGUSR1)[0] == 143
    result = read_json(out / "result.json")
    assert (result["status"], result["step"], result["stage"]) == ("interrupted", 0, "start")


def test_twice(tiny: MakeConfig, long_validation: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's status; what was recorded before stays."""
    config = tiny(training={"token_budget": 128 * 10**6}, data={"cache": str(long_validation.folder)})
    process = start(config, out, monkeypatch)
    wait(process, out, training)
    process.send_signal(SIGTERM)
    assert process.stderr is not None
    while "SIGTERM" not in process.stderr.readline():
        pass
    assert end(process, SIGINT)[0] == 143
    assert len(metrics_of(out)) > 30


def test_twice_the_same_at_once_is_one_wish(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` sends it: to the process and then to its group."""
    config = tiny(training={"token_budget": 128 * 10**6}, data={"cache": str(tiny_cache.folder)})
    process = start(config, out, monkeypatch)
    wait(process, out, training)
    process.send_signal(SIGINT)
    assert end(process, SIGINT)[0] == 130
    assert read_json(out / "result.json")["step"] == find_checkpoint(out).step


@pytest.mark.parametrize("lines", [0, 2])
def test_a_reader_that_goes_away_ends_no_training(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    config = tiny(training={"token_budget": 128 * 10**6}, data={"cache": str(tiny_cache.folder)})
    process = start(config, out, monkeypatch)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(lines):
        process.stderr.readline()
    process.stdout.close()
    process.stderr.close()
    wait(process, out, training)
    process.send_signal(SIGTERM)
    assert process.wait(timeout=240) == 143
    assert read_json(out / "result.json")["status"] == "interrupted"


def test_killed_in_training_leaves_whole_lines(
    tiny: MakeConfig, tiny_cache: TokenCache, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(training={"token_budget": 128 * 10**6}, data={"cache": str(tiny_cache.folder)})
    process = start(config, out, monkeypatch)
    wait(process, out, training)
    assert end(process, SIGKILL)[0] == -SIGKILL
    steps = [line["step"] for line in metrics_of(out)]
    assert steps == list(range(1, len(steps) + 1))
