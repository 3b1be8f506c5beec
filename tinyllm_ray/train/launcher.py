"""Starts and ends candidates' processes.

The launcher lives in the process that holds the device (a Ray actor, or a test) and keeps one starter. It imports no
PyTorch, and neither a candidate's crash nor its hang reaches it.
"""

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Clock, Deadline
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.train.compile_cache import cache_variables
from tinyllm_ray.train.outcome import RunningCandidate, build_record, judge
from tinyllm_ray.train.starter import end_group, open_log

COMPILED = "compiled"
"""Ending of the file, beside a candidate's log, that keeps what it compiled."""

_SECONDS_TO_END = 5.0
"""How long a killed candidate may take to be reaped before its starter is given up."""


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
        self._candidate: RunningCandidate | None = None

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
        self._candidate = RunningCandidate(request, deadline, self._clock(), time.time())
        log, compiled = (str(self._logs / f"{request['candidate']}.{kind}") for kind in ("log", COMPILED))
        asked = {**request, "log": log, "compiled": compiled}
        try:
            self._starter.stdin.write((json.dumps(asked) + "\n").encode())
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
            event |= {"status": self._stop_starter()}
        if event["event"] in {"ended", "starter_ended"}:
            return self._finish(candidate, *judge(candidate, event))
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
        with contextlib.suppress(OSError):
            self._logs.mkdir(exist_ok=True)
        with open(open_log(self._logs / "starter.log"), "ab") as log:
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

    def _stop_starter(self) -> int | None:
        """End the starter; its exit status, None where there was none."""
        if self._starter is None:
            return None
        assert self._starter.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a request that it never read
            self._starter.stdin.close()
        try:
            self._starter.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._starter.kill()
            self._starter.wait()
        os.close(self._events_fd)
        status, self._starter = self._starter.returncode, None
        return status

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

    def _cut(self, candidate: RunningCandidate) -> dict[str, Any]:
        """End a candidate at its limit."""
        self._kill(candidate)
        if candidate.result is not None or candidate.error is not None:
            return self._finish(candidate, *judge(candidate, {"event": "ended", "status": 0}))
        limit = candidate.request["limit_seconds"]
        return self._finish(candidate, Fate.TIMED_OUT, f"cut after {limit:.0f} s, during {candidate.stage}")

    def _kill(self, candidate: RunningCandidate) -> None:
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

    def _finish(self, candidate: RunningCandidate, fate: Fate, reason: str | None) -> dict[str, Any]:
        self._candidate = None
        total = self._clock() - candidate.began
        record = build_record(candidate, fate, reason, total, self._environment(), self._source, self._compile_cache)
        return {"event": "record", "record": record.model_dump(mode="json")}
