"""The line between a study's supervisor and its child: one request down, messages up, one JSON object a line.

The child's messages, one JSON object a line (`attach` gives it its end of the line):

    {"type": "out", "study": ID, "path": OUT}   all is validated and OUT exists: records go to OUT/trials.jsonl
    {"type": "record", "number": N, "record": {...}}
                                                is answered with N once it is fsynced on node-local disk, which the
                                                sender waits for: what it tells others of is never lost
    {"type": "standing", "exit_status": N}      the status if the study is cut from now on: the report on disk stands
    {"type": "done", "exit_status": N, "message": TEXT}
                                                the verdict, and why where there is something to say (else left out or
                                                null); the first counts, and the child then has DONE_SECONDS to end

Standard library only: the supervisor imports this module.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

STUDY_COMMAND = (sys.executable, "-m", "tinyllm_ray.tune.study_process")
"""The child that runs a study."""

CHANNEL_VARIABLE = "TINYLLM_RAY_CHANNEL"
"""Environment variable of the child: descriptors of the request, of the messages' pipe and of the answers'."""

_NUMBER_BYTES = 8

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Held back from the child until it attaches: it has no handlers before that, and would leave a traceback."""


class Channel:
    """The study's end of the line."""

    def __init__(self, request: dict[str, Any], descriptor: int, answers: int | None = None) -> None:
        """`answers` is where the supervisor says what is on the disk; without it nobody waits for that."""
        self.request = request
        """What was asked, with `budget_seconds`: seconds from this process's start until it is told to end."""
        self._descriptor = descriptor
        self._answers = answers
        self._lock = threading.Lock()
        self._torn = False
        self._records = 0

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; from any thread, but not from a signal handler. BrokenPipeError: the supervisor is gone.

        A record has been fsynced when this returns.
        """
        with self._lock:
            if kind == "record":
                self._records += 1
                fields["number"] = self._records
            line = json.dumps({"type": kind, **fields}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            # An exception out of a signal handler may have torn the last message: this one starts on a new line.
            rest = b"\n" + line if self._torn else line
            self._torn = True
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._torn = False
            if kind == "record" and self._answers is not None:
                self._await(self._answers, self._records)

    @property
    def alone(self) -> bool:
        """Whether the supervisor is gone."""
        poll = select.poll()
        poll.register(self._descriptor, 0)  # an error, which nobody being at the other end is, is always reported
        return bool(poll.poll(0))

    @staticmethod
    def _await(answers: int, number: int) -> None:
        while answer := os.read(answers, _NUMBER_BYTES):
            if int.from_bytes(answer, "big") >= number:
                return
        raise BrokenPipeError("the supervisor is gone")


def attach() -> Channel:
    """In the child, once it has its signal handlers: what the supervisor asked, and the way to answer."""
    request, messages, answers = map(int, os.environ.pop(CHANNEL_VARIABLE).split(","))
    for descriptor in (messages, answers):
        os.set_inheritable(descriptor, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    with open(request, "rb") as file:
        return Channel(json.load(file), messages, answers)


class Lines:
    """Messages of the child, read without ever waiting longer than asked."""

    def __init__(self, descriptor: int, answers: int | None = None) -> None:
        """`answers` is the writing end of the child's answers."""
        for one in (descriptor, answers):
            if one is not None:
                os.set_blocking(one, False)
        self._descriptor = descriptor
        self._answers = answers
        self._poll = select.poll()  # select.select refuses descriptors above 1023
        self._poll.register(descriptor, select.POLLIN)
        self._rest = b""
        self._ended = False

    def read(self, timeout_seconds: float) -> list[dict[str, Any]] | None:
        """What came within the time: no more than a pipe holds, maybe only a part of a message; None if nothing."""
        if self._ended or not self._poll.poll(timeout_seconds * 1000):
            time.sleep(timeout_seconds if self._ended else 0)
            return None
        data = os.read(self._descriptor, 1 << 20)
        self._ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [message for line in lines if line and (message := self._parse(line))]

    def acknowledge(self, number: int) -> None:
        """Tell the child that all records up to this one are on the disk; one that has gone needs no telling."""
        if self._answers is not None:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._answers, number.to_bytes(_NUMBER_BYTES, "big"))

    def close(self) -> None:
        for descriptor in (self._descriptor, self._answers):
            if descriptor is not None:
                os.close(descriptor)

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except ValueError as error:
            print(f"tinyllm_ray: a message of the study is torn and left out ({error})", file=sys.stderr, flush=True)
            return None
        assert isinstance(message, dict), message
        return message
