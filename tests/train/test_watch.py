"""A training beside its promise: throughput by training's seconds alone, kernels once, and both in result.json."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeClock
from promises import promised
from runs import learned, metrics_of, read_json

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.measure.kernels import KernelProfile
from tinyllm_ray.train import proved as proved_module
from tinyllm_ray.train import saving as saving_module
from tinyllm_ray.train.progress import Evaluating, Event
from tinyllm_ray.train.run import Run
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics
from tinyllm_ray.train.watch import Phases, Watch, predict

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are the CPU's")

UPDATES = 50

PROVED = """
from types import SimpleNamespace as Names
import torch
from tinyllm_ray.train.proved import prove

def trainer(step):
    execution, packing = Names(sdpa_backend="math"), Names(models=1)
    config = Names(execution=execution, packing=packing, packed_backward="at_once")
    return Names(device=torch.device("cpu"), synchronize=lambda: None, config=config, step=step)

ones = torch.ones(1, 1, 8, 8)
for step in (lambda: torch.bmm(ones[0], torch.softmax(ones[0], -1)), lambda: None):
    print(prove(trainer(step), None, 2)[0].line)
"""


@pytest.fixture(scope="module")
def short(tiny: MakeConfig) -> Config:
    """50 updates of 128 targets in 2 epochs, with a checkpoint every 10."""
    output = {"checkpoint": "interval", "checkpoint_interval": 10}
    return tiny(training={"token_budget": UPDATES * 128, "epochs": 2}, output=output)


class TestThroughput:
    """By sums alone: the watch is told seconds and has no clock."""

    @pytest.mark.parametrize("factor", [0.98, 1.02])
    def test_a_difference_of_two_percent_is_told_once(
        self, short: Config, factor: float, capsys: pytest.CaptureFixture[str]
    ) -> None:
        watch = Watch(promised(short, 1000.0), devices()[0])
        for _ in range(100):
            watch.note(round(10_000 * factor), 10.0)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1, "1,000 s are three times five minutes"
        assert f"{1000 * factor:,.0f} targets/s over five minutes of training, 2.0% " in said[0]
        assert ("less" if factor < 1 else "more") in said[0]
        assert "than the 1,000 that were promised" in said[0]
        result = watch.outcome(100, 0, Phases(2.5, 1000.0, 0.0, 0.0, 1002.5))
        assert result is not None
        assert result["warning"] == said[0]
        assert result["reached_targets_per_second"] == pytest.approx(1000 * factor)
        assert result["deviation"] == pytest.approx(factor - 1)

    @pytest.mark.parametrize("factor", [0.986, 1.014])
    def test_less_than_that_is_not(self, short: Config, factor: float, capsys: pytest.CaptureFixture[str]) -> None:
        watch = Watch(promised(short, 1000.0), devices()[0])
        for _ in range(100):
            watch.note(round(10_000 * factor), 10.0)
        assert capsys.readouterr().err == ""

    def test_five_minutes_have_to_be_over(self, short: Config, capsys: pytest.CaptureFixture[str]) -> None:
        watch = Watch(promised(short, 1000.0), devices()[0])
        watch.note(100, 299.0)
        assert capsys.readouterr().err == ""
        watch.note(1, 1.0)
        assert "0 targets/s over five minutes" in capsys.readouterr().err

    def test_a_fall_after_an_hour_shows(self, short: Config, capsys: pytest.CaptureFixture[str]) -> None:
        """The mean over all of it would hide it."""
        watch = Watch(promised(short, 1000.0), devices()[0])
        for _ in range(12):
            watch.note(300_000, 300.0)
        assert capsys.readouterr().err == ""
        watch.note(290_000, 300.0)
        assert "3.3% less" in capsys.readouterr().err

    def test_another_devices_promise_is_said_to_be_that_and_compared_with_nothing(
        self, short: Config, capsys: pytest.CaptureFixture[str]
    ) -> None:
        watch = Watch(promised(short, 1000.0, device_kind="cuda", device="NVIDIA H200"), devices()[0])
        watch.begin(100, 0)
        watch.note(1, 10_000.0)
        (said,) = capsys.readouterr().err.splitlines()
        assert f"is of another device, NVIDIA H200, and this is {devices()[0].name}" in said
        result = watch.outcome(100, 0, Phases(1.0, 1.0, 1.0, 1.0, 4.0))
        assert result is not None
        assert result["not_compared"] in said
        assert (result["deviation"], result["predicted_seconds"], result["total_deviation"]) == (None, None, None)
        assert result["took_seconds"]["total"] == 4.0

    def test_a_changed_execution_was_promised_nothing(self, short: Config, capsys: pytest.CaptureFixture[str]) -> None:
        changed = short.with_execution({"micro_batch_size": 2})
        watch = Watch(changed.model_copy(update={"tuned": promised(short).tuned}), devices()[0])
        watch.begin(100, 0)
        watch.note(1, 10_000.0)
        (said,) = capsys.readouterr().err.splitlines()
        assert "is of other settings" in said

    def test_another_torch_is_named(self, short: Config, capsys: pytest.CaptureFixture[str]) -> None:
        Watch(promised(short, versions={"torch": "1.0"}), devices()[0]).begin(10, 0)
        assert "with torch 1.0, and this is " in capsys.readouterr().err

    def test_without_a_promise_nothing_is_said(self, short: Config, capsys: pytest.CaptureFixture[str]) -> None:
        watch = Watch(short, devices()[0])
        watch.begin(10, 0)
        watch.note(1, 10_000.0)
        assert watch.outcome(10, 0, Phases(1.0, 1.0, 1.0, 1.0, 4.0)) is None
        assert capsys.readouterr().err == ""


def test_seconds_are_predicted_by_phase(short: Config) -> None:
    # The first of 11 updates of 128 targets is part of the start; an evaluation runs at three times the throughput.
    config = promised(short, 640.0, start_seconds=5.0)
    assert predict(config, 11, 3840, compiled_evaluation=False) == Phases(5.0, 2.0, 2.0, 0.0, 9.0)


@pytest.mark.parametrize(
    ("update", "compiled_evaluation", "seconds"),
    [
        ("compiled", False, 20.0 + 13.2),  # 0.33 microseconds each
        ("compiled", True, 20.0),
        ("eager", False, 20.0),  # the promise is of eager code, too
    ],
)
def test_an_eager_evaluation_beside_compiled_training_takes_longer_on_a_gpu(
    short: Config, update: str, compiled_evaluation: bool, seconds: float
) -> None:
    """8.7 M targets of 20m on an H200 took 4.4 s where training's rate alone promised 1.2.

    Which it is cannot be told by their number: eight models of 5 M each are eager, 40 M of which 5 were made are not.
    """
    config = promised(short.with_execution({"update": update}), 2e6 / 3, device_kind="cuda", device=devices()[0].name)
    assert predict(config, 1, 40_000_000, compiled_evaluation).evaluation == pytest.approx(seconds)
    result = Watch(config, devices()[0], compiled_evaluation).outcome(1, 40_000_000, Phases(1.0, 1.0, 1.0, 1.0, 4.0))
    assert result is not None
    assert result["predicted_seconds"]["evaluation"] == pytest.approx(seconds)


class SlowMachine:
    """A clock that only updates, evaluations, checkpoints and the reading of a profile advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        step, save, record = Trainer.step, saving_module.save_checkpoint, proved_module.record_kernels

        def slow_step(trainer: Trainer) -> Statistics:
            self.clock.advance(10.0)
            return step(trainer)

        def slow_save(*arguments: Any, **options: Any) -> Path:
            self.clock.advance(1000.0)
            return save(*arguments, **options)

        def slow_record(*arguments: Any) -> KernelProfile:
            found = record(*arguments)
            self.clock.advance(200.0)
            return found

        monkeypatch.setattr(Trainer, "step", slow_step)
        monkeypatch.setattr(proved_module, "record_kernels", slow_record)
        monkeypatch.setattr(saving_module, "save_checkpoint", slow_save)

    def hear(self, event: Event) -> None:
        if isinstance(event, Evaluating):
            self.clock.advance(500.0)

    def run(self, config: Config, cache: TokenCache, out: Path) -> dict[str, Any]:
        assert Run(config, cache, out, on_progress=self.hear, clock=self.clock).execute() == 0
        result: dict[str, Any] = read_json(out / "result.json")
        return result


class TestRun:
    def test_evaluations_checkpoints_and_the_proof_are_no_part_of_the_throughput(
        self,
        short: Config,
        tiny_cache: TokenCache,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """12.8 targets/s in 490 s of updates, between which hours go by."""
        machine = SlowMachine(monkeypatch)
        promise = machine.run(promised(short, 12.8, start_seconds=10.0), tiny_cache, tmp_path)["promise"]
        assert promise["warning"] is None
        assert promise["reached_targets_per_second"] == pytest.approx(12.8)
        assert "five minutes" not in capsys.readouterr().err
        assert promise["predicted_seconds"]["training"] == pytest.approx(490.0)
        took = promise["took_seconds"]
        assert (took["start"], took["training"], took["checkpoints"]) == pytest.approx((10.0, 690.0, 5000.0))
        assert took["evaluation"] >= 1500.0
        assert took["total"] == pytest.approx(sum(took[name] for name in took.keys() - {"total"}))
        assert promise["total_deviation"] == pytest.approx(took["total"] / promise["predicted_seconds"]["total"] - 1)

    def test_a_slow_run_warns_and_keeps_both_figures(
        self,
        short: Config,
        tiny_cache: TokenCache,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        promise = SlowMachine(monkeypatch).run(promised(short, 13.1), tiny_cache, tmp_path)["promise"]
        assert "13 targets/s over five minutes of training, 2.3% less" in promise["warning"]
        assert capsys.readouterr().err.count(promise["warning"]) == 1
        assert (promise["targets_per_second"], promise["reached_targets_per_second"]) == pytest.approx((13.1, 12.8))

    def test_evaluated_targets_are_those_of_every_evaluation(
        self, short: Config, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        config = promised(short, 1000.0)
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        result = read_json(tmp_path / "result.json")
        targets = 2 * 8 * 16 + result["validation"]["tokens"]
        assert result["promise"]["predicted_seconds"]["evaluation"] == pytest.approx(targets / 3000.0)


@pytest.fixture(scope="module")
def plain(short: Config, tiny_cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run without a promise learns."""
    out = tmp_path_factory.mktemp("plain")
    assert Run(short, tiny_cache, out).execute() == 0
    assert read_json(out / "result.json")["promise"] is None
    return learned(out)


class TestProof:
    @pytest.fixture(autouse=True)
    def _unhurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three updates are profiled however slow the machine is."""
        monkeypatch.setattr(proved_module, "_LIMIT_SECONDS", 1e9)

    def test_the_kernels_are_those_promised(
        self,
        short: Config,
        tiny_cache: TokenCache,
        tmp_path: Path,
        plain: dict[str, Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        with caplog.at_level(logging.INFO):
            assert Run(promised(short), tiny_cache, tmp_path).execute() == 0
        proof = read_json(tmp_path / "result.json")["promise"]["proof"]
        assert (proof["attention"], proof["promised_attention"], proof["faults"]) == (["flash"], ["flash"], [])
        assert proof["updates"] == 3
        assert proof["line"].endswith("as promised")
        assert [record.getMessage() for record in caplog.records].count(proof["line"]) == 1
        assert learned(tmp_path) == plain, "the profiled updates are the recipe's own"

    def test_other_attention_is_a_warning_with_both_names(
        self, short: Config, tiny_cache: TokenCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = promised(short, attention=("math",))
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        proof = read_json(tmp_path / "result.json")["promise"]["proof"]
        assert proof["faults"] == ["attention ran on flash, and math was promised"]
        assert capsys.readouterr().err.count(proof["line"]) == 1

    def test_a_kind_of_kernel_that_came_or_went_is_named(
        self, short: Config, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """The study saw none of what runs here; of ten kinds one takes a tenth of an update at least."""
        config = promised(short, kernel_milliseconds={"invented": 9.9, "rare": 0.1})
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        faults = read_json(tmp_path / "result.json")["promise"]["proof"]["faults"]
        assert "no invented kernels ran" in faults
        assert not any("rare" in fault for fault in faults), "1% of an update may come and go"
        assert any(fault.endswith("kernels ran, which the study had none of") for fault in faults)

    def test_a_kind_that_the_study_saw_may_take_any_time(self) -> None:
        study, here = {"matmul": 9.0, "copy": 0.1}, {"matmul": 1.0, "copy": 9.0, "norm": 0.1}
        assert proved_module._differences(here, study) == []

    def test_it_stops_where_an_evaluation_is_due(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """An epoch an update: a profile of three would pass over two of their evaluations."""
        config = tiny(training={"token_budget": 10 * 128, "epochs": 10})
        for out, each in ((tmp_path / "plain", config), (tmp_path / "tuned", promised(config))):
            out.mkdir()
            assert Run(each, tiny_cache, out).execute() == 0
        assert learned(tmp_path / "tuned") == learned(tmp_path / "plain")
        assert read_json(tmp_path / "tuned/result.json")["promise"]["proof"]["updates"] == 1

    def test_a_profiler_that_fails_costs_the_proof_alone(
        self,
        short: Config,
        tiny_cache: TokenCache,
        tmp_path: Path,
        plain: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(step: Callable[[], object], *rest: object) -> None:
            step()
            raise RuntimeError("CUPTI is busy")

        monkeypatch.setattr(proved_module, "record_kernels", fail)
        assert Run(promised(short), tiny_cache, tmp_path).execute() == 0
        proof = read_json(tmp_path / "result.json")["promise"]["proof"]
        assert proof["line"] == "kernels are not proved: RuntimeError: CUPTI is busy"
        assert learned(tmp_path) == plain

    def test_a_run_too_short_for_it_has_none(self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path) -> None:
        config = promised(tiny(training={"max_updates": 4}))
        assert Run(config, tiny_cache, tmp_path).execute() == 0
        assert read_json(tmp_path / "result.json")["promise"]["proof"] is None
        assert len(metrics_of(tmp_path)) == 4

    def test_the_profiler_writes_nothing_of_its_own_and_says_why_where_it_saw_nothing(self) -> None:
        clean = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
        ended = subprocess.run([sys.executable, "-c", PROVED], env=clean, capture_output=True, text=True, check=True)
        assert ended.stderr == ""
        proved, nothing = ended.stdout.splitlines()
        assert "attention on math" in proved
        assert "no attention among 0 recorded kernels; KINETO_LOG_LEVEL=4 has the profiler say why" in nothing

    def test_a_resumed_session_proves_its_own(self, short: Config, tiny_cache: TokenCache, tmp_path: Path) -> None:
        from tinyllm_ray.train.checkpoints import find_checkpoint

        config = promised(short)
        assert Run(config, tiny_cache, tmp_path, stop_at=10).execute() == 0
        assert Run(config, tiny_cache, tmp_path, checkpoint=find_checkpoint(tmp_path)).execute() == 0
        promise = read_json(tmp_path / "result.json")["promise"]
        assert promise["proof"]["attention"] == ["flash"]
        assert promise["predicted_seconds"]["training"] == pytest.approx(39 * 128 / 1000.0)
