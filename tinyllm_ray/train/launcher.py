"""Starts and ends candidates' processes, and turns what they said into TrialRecords.

The launcher lives in the process that holds the device (a Ray actor, or a test) and keeps one starter. It imports no
PyTorch, and neither a candidate's crash nor its hang reaches it.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Clock, Deadline
from tinyllm_ray.config import Config, identity
from tinyllm_ray.records import Device, Fate, Memory, Protocol, Seconds, TrialRecord, Window
from tinyllm_ray.train.compile_cache import cache_variables
from tinyllm_ray.train.starter import end_group

_SECONDS_TO_END = 5.0
"""How long a killed candidate may take to be reaped before its starter is given up."""


@dataclass
class Candidate:
    """What is known of a running candidate."""

    request: Mapping[str, Any]
    deadline: Deadline
    began: float
    timestamp: float
    pid: int | None = None
    stage: str = "start"
    stage_seconds: dict[str, float] = field(default_factory=dict)
    start_stage_seconds: dict[str, float] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the candidate's process."""
        match event["event"]:
            case "forked":
                self.pid = event["pid"]
            case "stage":
                if "seconds" in event:
                    self.stage_seconds[self.stage] = event["seconds"]
                self.start_stage_seconds |= event.get("stages", {})
                self.stage = event["stage"]
            case "window":
                self.windows.append(Window.model_validate(event["window"]))
            case "result":
                self.result = dict(event)
            case "error":
                self.error = dict(event)


class Launcher:
    """Runs candidates one after the other in processes forked from one starter.

    `environment` is asked once, while the first candidate runs its course, and goes into every record; `logs` gets a
    file a candidate. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        logs: Path,
        compile_cache: str,
        environment: Callable[[], Mapping[str, Any]],
        source: Mapping[str, Any],
        clock: Clock = time.monotonic,
    ) -> None:
        self._logs = logs
        self._compile_cache = compile_cache
        self._environment = functools.cache(environment)
        self._source = source
        self._clock = clock
        self._starter: subprocess.Popen[bytes] | None = None
        self._events_fd = -1
        self._buffer = b""
        self._candidate: Candidate | None = None

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Start the starter ahead of the first candidate, so that its imports (4-8 s) overlap with other work."""
        if self._starter is None or self._starter.poll() is not None:
            self._start_starter()

    def begin(self, request: Mapping[str, Any]) -> None:
        """Hand one TrialRequest to the starter."""
        assert self._candidate is None, "one candidate at a time"
        self.warm_up()
        assert self._starter is not None
        assert self._starter.stdin is not None
        deadline = Deadline.after(request["limit_seconds"], self._clock)
        self._candidate = Candidate(request, deadline, self._clock(), time.time())
        log = self._logs / f"{request['candidate']}.log"
        try:
            self._starter.stdin.write((json.dumps({**request, "log": str(log)}) + "\n").encode())
            self._starter.stdin.flush()
        except BrokenPipeError:
            # Its end shows in `step` as the end of the events.
            return
        self._environment()  # while the starter imports

    def step(self) -> dict[str, Any]:
        """Wait for the candidate's next event; the last one is `{"event": "record", "record": {...}}`."""
        candidate = self._candidate
        assert candidate is not None, "begin a candidate first"
        event = self._next_event(candidate.deadline)
        if event is None:
            return self._cut(candidate)
        if event["event"] == "starter_ended":
            # The candidate goes with its starter; what it started itself is in its process group.
            end_group(candidate.pid or 0)
            self._stop_starter()
        if event["event"] in {"ended", "starter_ended"}:
            return self._finish(candidate, *self._judge(candidate, event))
        candidate.hear(event)
        if event["event"] in {"result", "error"}:
            # All is said; a process that does not end now hangs in its exit.
            candidate.deadline = Deadline.after(_SECONDS_TO_END, self._clock)
        return event

    def run(self, request: Mapping[str, Any]) -> TrialRecord:
        """One candidate from request to record."""
        self.begin(request)
        while (event := self.step())["event"] != "record":
            pass
        return TrialRecord.model_validate(event["record"])

    def abandon(self) -> None:
        """End the running candidate, if there is one, without a record."""
        if self._candidate is not None:
            self._kill(self._candidate)
            self._candidate = None

    def close(self) -> None:
        """End the candidate and the starter."""
        self.abandon()
        self._stop_starter()

    def _start_starter(self) -> None:
        self._stop_starter()
        events, events_write = os.pipe()
        environment = {
            **os.environ,
            **cache_variables(self._compile_cache),
            # Importing Inductor asks for the devices; through NVML that leaves CUDA usable in forks.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / "starter.log").open("ab") as log:
            self._starter = subprocess.Popen(
                [sys.executable, "-m", "tinyllm_ray.train.starter", str(events_write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(events_write,),
                start_new_session=True,
                env=environment,
            )
        os.close(events_write)
        self._events_fd, self._buffer = events, b""

    def _stop_starter(self) -> None:
        if self._starter is None:
            return
        assert self._starter.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a request that it never read
            self._starter.stdin.close()
        try:
            self._starter.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._starter.kill()
            self._starter.wait()
        os.close(self._events_fd)
        self._starter = None

    def _next_event(self, deadline: Deadline) -> dict[str, Any] | None:
        """The next event, None once `deadline` has passed; `starter_ended` when there will be no more."""
        while b"\n" not in self._buffer:
            left = deadline.remaining()
            if left <= 0 or not select.select([self._events_fd], [], [], left)[0]:
                return None
            data = os.read(self._events_fd, 65536)
            if not data:
                return {"event": "starter_ended"}
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        return event

    def _cut(self, candidate: Candidate) -> dict[str, Any]:
        """End a candidate at its limit."""
        self._kill(candidate)
        if candidate.result is not None or candidate.error is not None:
            return self._finish(candidate, *self._judge(candidate, {"event": "ended", "status": 0}))
        limit = candidate.request["limit_seconds"]
        return self._finish(candidate, Fate.TIMED_OUT, f"cut after {limit:.0f} s, during {candidate.stage}")

    def _kill(self, candidate: Candidate) -> None:
        """SIGKILL the candidate's process group and take its end off the events; a silent starter goes too."""
        ended = False
        if candidate.pid is not None:
            end_group(candidate.pid)
            for event in self._events_until(Deadline.after(_SECONDS_TO_END, self._clock)):
                candidate.hear(event)  # said before the end, not read until now
                if ended := event["event"] == "ended":
                    break
        if not ended:
            assert self._starter is not None
            self._starter.kill()
            self._stop_starter()

    def _events_until(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        while (event := self._next_event(deadline)) is not None and event["event"] != "starter_ended":
            yield event

    def _judge(self, candidate: Candidate, event: Mapping[str, Any]) -> tuple[Fate, str | None]:
        """Fate and reason of a candidate whose process has ended."""
        if candidate.error is not None:
            fate = Fate.OUT_OF_MEMORY if candidate.error["out_of_memory"] else Fate.FAILED
            return fate, candidate.error["reason"]
        if event["event"] == "starter_ended":
            return Fate.FAILED, "the starter process ended; its log is starter.log"
        if candidate.result is None:
            return Fate.FAILED, f"the process {_exit_words(event['status'])} during {candidate.stage}"
        if any(window.loss is None or window.grad_norm is None for window in candidate.windows):
            return Fate.INVALID, "the loss or the gradient norm is not finite"
        return Fate.COMPLETE, None

    def _finish(self, candidate: Candidate, fate: Fate, reason: str | None) -> dict[str, Any]:
        self._candidate = None
        total = self._clock() - candidate.began
        record = build_record(candidate, fate, reason, total, self._environment(), self._source, self._compile_cache)
        return {"event": "record", "record": record.model_dump(mode="json")}


def build_record(
    candidate: Candidate,
    fate: Fate,
    reason: str | None,
    total_seconds: float,
    environment: Mapping[str, Any],
    source: Mapping[str, Any],
    compile_cache: str | None,
) -> TrialRecord:
    """The record of a candidate from what its process said before it ended."""
    request, result = candidate.request, candidate.result or {}
    config = Config.model_validate(request["config"])
    execution = config.execution.model_dump(mode="json")
    first = candidate.stage_seconds.get("compile")
    warmup = candidate.stage_seconds.get("warmup")
    return TrialRecord(
        study=request["study"],
        candidate=request["candidate"],
        kind="measurement",
        fate=fate,
        reason=reason,
        recipe_identity=config.recipe_identity,
        execution_identity=identity(execution),
        cache_identity=request["cache_identity"],
        source_identity=source["sha256"],
        source_dirty=source["dirty"],
        execution=execution,
        protocol=Protocol.model_validate(request["protocol"]),
        devices=[Device.model_validate(device) for device in result.get("devices", [])],
        seconds=Seconds(
            start=candidate.stage_seconds.get("start"),
            compile=first,
            warmup=None if warmup is None or first is None else warmup - first,
            windows=sum(window.seconds for window in candidate.windows) if candidate.windows else None,
            total=total_seconds,
        ),
        start_stage_seconds=candidate.start_stage_seconds,
        windows=candidate.windows,
        first_update_seconds=first,
        warmup_seconds=warmup,
        seconds_per_update=result.get("seconds_per_update"),
        targets_per_second=result.get("targets_per_second"),
        memory=Memory.model_validate(result.get("memory", {})),
        environment={**environment, "cpu_threads": result.get("threads")},
        compile_cache=compile_cache,
        configuration=request["configuration"],
        timestamp=candidate.timestamp,
    )


def _exit_words(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    hint = ", perhaps by the kernel for want of memory" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"
