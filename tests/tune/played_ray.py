"""Ray and its measurements played, in milliseconds; all else of a study is the product's own, in its own processes."""

import contextlib
import importlib
import json
import os
import random
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tinyllm_ray.cluster
from tinyllm_ray.clock import Deadline
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.records import Fate
from tinyllm_ray.train.outcome import RunningCandidate, build_record
from tinyllm_ray.tune import __main__ as command
from tinyllm_ray.tune import child, study_process, study_run, supervisor
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.processes import STUDY_VARIABLE

RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, context: 64, vocab_size: 32000}
optimizer: {peak_learning_rate: 1e-3, betas: [0.9, 0.95]}
training: {tokens_per_update: 512, token_budget: 51_200, epochs: 2}
evaluation: {subset_blocks: 8}
"""
SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [1, 2, 4, 8], sdpa_backend: [auto, math], cpu_threads: [1, 2]}
protocol: {data_mode: synthetic, warmup_updates: 1, windows: 2, updates_per_window: 2}
search_windows: by_count
"""
LOG = "log.jsonl"
"""Beside OUT: what a study's process knows to be so, a line each."""


def run_session(folder: Path, arguments: Sequence[str]) -> int:
    """The command line, as a process of its own would run it."""
    supervisor._IMPORTED_AT = time.monotonic()
    os.setsid()
    os.chdir(folder)
    descriptor = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    return command.main(list(arguments))


class ForkedStudy:
    """`subprocess.Popen` of the study's command, without two seconds of imports."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                os.environ.clear()
                os.environ.update(env)
                for name in os.listdir("/proc/self/fd"):
                    if int(name) not in {0, 1, 2, *pass_fds}:
                        with contextlib.suppress(OSError):
                            os.close(int(name))
                supervisor._IMPORTED_AT = time.monotonic()
                status = study_process.main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        if self._code is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(found[1])
        return self._code


@contextlib.contextmanager
def connect(address: str | None, only: str | None = None) -> Iterator[Any]:
    yield types.SimpleNamespace(
        address="played",
        dashboard=None,
        started=True,
        nodes=1,
        gpus=0,
        cores_per_node=2,
        device_kind="cpu",
        accelerators=(),
    )


def run_trials(driver: Any, connection: Any, logs: Path, *_: Any) -> None:
    note(kind="begun", left=driver.seconds_left)
    chance = random.Random(os.getpid())
    while (request := driver.ask()) is not None:
        name = request["candidate"]
        driver.hear(name, {"event": "stage", "stage": "start", "seconds": 0.001})
        time.sleep(chance.uniform(0, 0.01))
        if chance.random() < 0.05:
            driver.lose(name)
        else:
            driver.hear(name, {"event": "record", "record": measured(request, chance)})
    assert driver.finished


def measured(request: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A record like any other."""
    running = RunningCandidate(request, Deadline.after(1), 0.0, time.time())
    for stage, seconds in (("start", 0.001), ("compile", 0.001), ("warmup", 0.002)):
        running.stage = stage
        running.stage_seconds[stage] = seconds
    execution = request["config"]["execution"]
    rate = 1000.0 * (1 + execution["micro_batch_size"] / 8 + execution["cpu_threads"]) * chance.uniform(0.97, 1.03)
    fate = chance.choices([Fate.COMPLETE, Fate.FAILED, Fate.OUT_OF_MEMORY, Fate.TIMED_OUT], [90, 2, 2, 6])[0]
    if "math" not in request["candidate"] and execution["micro_batch_size"] == 8:
        fate = Fate.COMPLETE  # the baseline for one, without which there is no study
    if fate is Fate.COMPLETE:
        for index in range(2):
            window = {"index": index, "updates": 2, "targets": 1024, "seconds": 1024 / rate, "targets_per_second": rate}
            more = {"data_wait_seconds": 0.0, "loss": 9.0, "grad_norm": 1.0, "timestamp": time.time()}
            running.hear({"event": "window", "window": window | more})
        device = {"kind": "cpu", "name": "played", "host": "here"}
        running.hear(
            {"event": "result", "targets_per_second": rate, "seconds_per_update": 512 / rate, "devices": [device]}
        )
    source = {"sha256": source_identity().sha256, "dirty": None}
    return build_record(running, fate, None, 0.01, {}, source, None).model_dump(mode="json")


def key_of(record: dict[str, Any]) -> str:
    """What tells a record from all others."""
    return f"{record['candidate']} {record['timestamp']}"


def note(**known: Any) -> None:
    """One line, whole whatever happens to this process afterwards."""
    descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, json.dumps({"session": os.environ[STUDY_VARIABLE], **known}).encode() + b"\n")
    os.close(descriptor)


def play_ray(run_trials: Callable[..., None] = run_trials) -> None:
    """Put the stand-ins in the place of Ray; everything else stays."""
    for name in (
        "callbacks",
        "metrics",
        "names",
    ):  # they import Ray, which a session forked from here need not do again
        importlib.import_module(f"tinyllm_ray.cluster.{name}")
    for name, parts in {
        "connect": {"connect": connect},
        "trials": {
            "run_trials": run_trials,
            "concurrency": lambda connection: 1,
            "resources": lambda connection: {"CPU": 2},
        },
        "prefetch": {"prefetching": contextlib.nullcontext},
    }.items():
        module = types.ModuleType(f"tinyllm_ray.cluster.{name}")
        vars(module).update(parts)
        sys.modules[module.__name__] = module
        setattr(tinyllm_ray.cluster, name, module)
    child.subprocess = types.SimpleNamespace(Popen=ForkedStudy, DEVNULL=None)  # type: ignore[assignment]
    study_run.PageMaker = lambda out, say: None  # type: ignore[assignment,misc]
    command.bring_up_to_date = lambda out, deadline: None  # type: ignore[attr-defined]
    send = Channel.send

    def send_and_note(self: Channel, kind: str, **fields: Any) -> None:
        send(self, kind, **fields)
        if kind == "record":
            note(kind="recorded", key=key_of(fields["record"]))

    Channel.send = send_and_note  # type: ignore[method-assign]
