"""Whole candidates as the tuner runs them: the real starter, forks of it, PyTorch in each."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linux_processes import alive, ends, group

import tinyllm_ray
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.judgement import judged
from tinyllm_ray.train.launcher import Launcher
from tinyllm_ray.train.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes as Linux has it"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes"),
]

MakeConfig = Callable[..., Config]

SHORT = Protocol(data_mode="synthetic", warmup_updates=2, windows=2, updates_per_window=3)
ENDLESS = Protocol(data_mode="synthetic", warmup_updates=1, windows=10**9, updates_per_window=1)


class Bench:
    """A launcher, whose clock a test may set on, and its requests."""

    def __init__(self, folder: Path, tiny: MakeConfig) -> None:
        self.folder = folder
        self.skew = 0.0
        self.tiny = tiny
        self._requests = 0
        self.launcher = Launcher(
            logs=folder / "logs",
            compile_cache=str(folder / "compile"),
            environment=dict,
            source={"sha256": "s" * 64, "dirty": None},
            clock=lambda: time.monotonic() + self.skew,
        )

    def request(self, config: Config, protocol: Protocol = SHORT, cache: TokenCache | None = None) -> dict[str, Any]:
        self._requests += 1
        return {
            "study": "s",
            "candidate": f"c{self._requests:03}",
            "label": "l",
            "config": config.model_dump(mode="json"),
            "protocol": protocol.model_dump(mode="json"),
            "cache": cache and str(cache.folder),
            "cache_identity": cache and cache.identity,
            "configuration": None,
            "limit_seconds": 10_000.0,
        }

    def run(self, config: Config, **keywords: Any) -> TrialRecord:
        return self.launcher.run(self.request(config, **keywords))

    def begin_endless(self, config: Config | None = None) -> int:
        """The process of a candidate that is past its second window."""
        self.launcher.begin(self.request(config or self.tiny(), ENDLESS))
        pid: int | None = None
        windows = 0
        while windows < 2:
            event = self.launcher.step()
            pid = event["pid"] if event["event"] == "forked" else pid
            windows += event["event"] == "window"
        assert pid is not None
        return pid

    def record(self) -> TrialRecord:
        while (event := self.launcher.step())["event"] != "record":
            pass
        return TrialRecord.model_validate(event["record"])

    @property
    def starter(self) -> int:
        process = self.launcher._starter
        assert process is not None
        return process.pid


@pytest.fixture(autouse=True)
def _one_at_a_time(bench: "Bench") -> Iterator[None]:
    """A test that fails leaves no candidate for the next one to stumble over."""
    yield
    bench.launcher.abandon()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny: MakeConfig) -> Iterator[Bench]:
    """One starter serves them all, since it takes seconds to import PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(tinyllm_ray.__file__).parents[1]))
        patch.setenv("OMP_NUM_THREADS", "3")  # Ray has it in its actors; what the execution asks for counts
        bench = Bench(tmp_path_factory.mktemp("bench"), tiny)
        with bench.launcher:
            yield bench


def figures_here(config: Config, cache: TokenCache | None = None) -> list[tuple[float, float]]:
    """Loss and gradient norm at the end of each window of SHORT, in this process and without a launcher."""
    with Trainer(config, cache) as trainer:
        said = [trainer.step() for _ in range(SHORT.warmup_updates + SHORT.windows * SHORT.updates_per_window)]
    return [(said[at].loss.mean().item(), said[at].grad_norm.mean().item()) for at in (4, 7)]


def assert_learned(record: TrialRecord, expected: list[tuple[float, float]]) -> None:
    found = [(window.loss, window.grad_norm) for window in record.windows]
    assert found == [pytest.approx(pair, rel=1e-4) for pair in expected]


def test_an_eager_candidate_has_a_whole_record(bench: Bench, tiny: MakeConfig) -> None:
    record = bench.run(tiny())
    assert (record.fate, record.reason) == (Fate.COMPLETE, None)
    assert record.protocol == SHORT
    assert [(window.updates, window.targets) for window in record.windows] == [(3, 384), (3, 384)]
    assert record.targets_per_second is not None
    assert record.seconds_per_update == pytest.approx(128 / record.targets_per_second, rel=0.5)
    for seconds in (record.seconds.start, record.seconds.compile, record.seconds.warmup, record.seconds.windows):
        assert seconds is not None
        assert seconds > 0
    assert record.seconds.total is not None
    assert record.seconds.total >= record.seconds.start + record.warmup_seconds + record.seconds.windows
    assert record.memory.used_bytes is not None
    assert record.memory.total_bytes is not None
    assert 50 * 2**20 < record.memory.used_bytes < record.memory.total_bytes
    (device,) = record.devices
    assert (device.kind, device.host) == ("cpu", os.uname().nodename)
    assert record.environment["cpu_threads"] == 1
    assert_learned(record, figures_here(tiny()))
    assert record.seconds.proof is not None
    assert record.seconds.proof > 0
    assert record.kernels is not None
    assert {"attention_forward", "attention_backward", "optimizer"} <= {kernel.category for kernel in record.kernels}
    assert record.proof is not None
    assert record.proof.attention_seen == ["flash"]
    assert [point.update for point in record.proof.trajectory] == [1, 5]


def test_a_candidate_trains_on_the_tokens_of_the_cache(bench: Bench, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    record = bench.run(tiny(), protocol=SHORT.model_copy(update={"data_mode": "real"}), cache=tiny_cache)
    assert (record.fate, record.cache_identity) == (Fate.COMPLETE, tiny_cache.identity)
    assert_learned(record, figures_here(tiny(), tiny_cache))


@pytest.mark.usefixtures("compiler")
@pytest.mark.long
def test_a_compiled_candidate_learns_as_an_eager_one(bench: Bench, tiny: MakeConfig) -> None:
    """A single layer, since each of its fifteen kernels costs a compiler two seconds."""
    record = bench.run(tiny(model={"layers": 1}, execution={"update": "compiled"}))
    eager = bench.run(tiny(model={"layers": 1}))
    record = judged(record, [eager], eager.execution_identity, lambda update: 0.0)
    assert (record.fate, record.reason) == (Fate.COMPLETE, None)
    assert record.proof is not None
    assert record.proof.attention_seen == ["flash"]
    assert record.execution["compile_mode"] == "default"
    assert_learned(record, figures_here(tiny(model={"layers": 1})))
    assert list((bench.folder / "compile" / "inductor" / "aotautograd").iterdir()), "a cache the next one starts from"


def test_candidates_have_processes_of_their_own(bench: Bench) -> None:
    first = bench.begin_endless()
    starter = bench.starter
    bench.launcher.abandon()
    second = bench.begin_endless()
    assert bench.starter == starter
    assert len({first, second, starter, os.getpid()}) == 4
    assert (alive(first), alive(second)) == (False, True)
    assert group(second) == [second]
    bench.launcher.abandon()
    assert not alive(second)


@pytest.mark.slow
def test_processes_of_packed_models_are_their_candidates(bench: Bench, tiny: MakeConfig) -> None:
    config = tiny(packing={"models": 2}, execution={"packed_backward": "processes"})
    assert_learned(bench.run(config), figures_here(config.with_execution({"packed_backward": "one_by_one"})))
    pid = bench.begin_endless(config)
    members = group(pid)
    assert len(members) >= 3, "a process a model"
    bench.launcher.abandon()
    assert all(map(ends, members))


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_a_candidate_after_others_equals_one_alone(bench: Bench, tiny: MakeConfig, tmp_path: Path) -> None:
    """All of an A/A test that is no matter of time: what it learned, bit for bit, what ran, its threads and memory."""
    config = tiny(model={"layers": 1})
    with Bench(tmp_path, tiny).launcher as fresh:
        alone = fresh.run(bench.request(config))
    bench.run(tiny(model={"layers": 1}, execution={"update": "compiled"}))
    bench.run(tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0}))
    bench.run(tiny(execution={"sdpa_backend": "cudnn"}))
    os.kill(bench.begin_endless(tiny(execution={"cpu_threads": 2})), signal.SIGKILL)
    bench.record()
    after = bench.run(config)
    assert (alone.fate, after.fate) == (Fate.COMPLETE, Fate.COMPLETE)
    for one in (alone, after):
        assert one.proof is not None
        assert one.kernels is not None
        assert one.proof.trajectory
    told = [
        (
            one.proof and one.proof.trajectory,
            [(window.loss, window.grad_norm) for window in one.windows],
            one.environment["cpu_threads"],
            {kernel.name: kernel.launches for kernel in one.kernels or ()},
        )
        for one in (alone, after)
    ]
    assert told[0] == told[1]
    assert after.memory.used_bytes == pytest.approx(alone.memory.used_bytes, rel=0.05)


@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_what_cannot_run_here_fails_with_its_reason(bench: Bench, tiny: MakeConfig, backend: str) -> None:
    record = bench.run(tiny(execution={"sdpa_backend": backend}))
    assert record.fate is Fate.FAILED
    assert record.reason is not None
    assert record.reason.startswith(f"ConfigError: execution.sdpa_backend: '{backend}' (a CPU has ")
    assert record.seconds.start is None
    assert (record.windows, record.targets_per_second) == ([], None)


def test_numbers_that_are_not_finite_make_it_invalid(bench: Bench, tiny: MakeConfig) -> None:
    record = bench.run(tiny(optimizer={"peak_learning_rate": 1e10}, training={"warmup_fraction": 0.0}))
    assert (record.fate, record.reason) == (Fate.INVALID, "the loss or the gradient norm is not finite")
    assert [window.loss for window in record.windows] == [None, None]


def test_killed_it_fails_and_the_next_one_runs(bench: Bench, tiny: MakeConfig) -> None:
    pid = bench.begin_endless()
    os.kill(pid, signal.SIGKILL)
    record = bench.record()
    assert record.fate is Fate.FAILED
    assert record.reason is not None
    assert "SIGKILL" in record.reason
    assert len(record.windows) >= 2
    assert len(record.devices) == 1, "where it ran is said before it ends"
    assert bench.run(tiny()).fate is Fate.COMPLETE


def test_over_its_limit_it_is_cut_with_its_windows(bench: Bench, tiny: MakeConfig) -> None:
    pid, starter = bench.begin_endless(), bench.starter
    os.kill(pid, signal.SIGSTOP)  # as if it hung; and it would write on
    bench.skew += 10_000.0
    record = bench.record()
    assert (record.fate, record.reason) == (Fate.TIMED_OUT, "cut after 10000 s, during windows")
    assert len(record.windows) >= 2
    assert record.seconds.windows == pytest.approx(sum(window.seconds for window in record.windows))
    assert group(pid) == []
    assert bench.run(tiny()).fate is Fate.COMPLETE
    assert bench.starter == starter


def test_without_its_starter_it_fails_and_the_next_one_gets_another(bench: Bench, tiny: MakeConfig) -> None:
    pid, starter = bench.begin_endless(), bench.starter
    os.kill(starter, signal.SIGKILL)
    record = bench.record()
    assert (record.fate, record.reason) == (Fate.FAILED, "the starter process ended; its log is starter.log")
    assert ends(pid)
    assert bench.run(tiny()).fate is Fate.COMPLETE
    assert bench.starter != starter


def test_closing_leaves_no_process(bench: Bench) -> None:
    """The last one: the fixture's launcher is closed here."""
    pid, starter = bench.begin_endless(), bench.starter
    bench.launcher.close()
    assert ends(pid)
    assert not alive(starter)
    assert group(pid) == group(starter) == []
