"""The signals that ask a run to end: who hears them, and whether it ends at once or where the run says.

Python runs a signal's handler on the main thread, between two of its own instructions: not while an import, a
compilation or a backward pass is inside C++. So a thread hears signals through the wake-up descriptor that the
interpreter's C handler writes to (`signal.set_wakeup_fd`), and can end the process whatever the main thread does.
Standard library only: signals are heard from before PyTorch is imported.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from tinyllm_ray.command import say
from tinyllm_ray.errors import EXIT_SIGINT, EXIT_SIGTERM

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""SIGUSR1 is what Slurm is asked to send some time before a job's limit (`sbatch --signal=USR1@60`), SIGHUP what a
terminal sends that goes away (unless `nohup` has it ignored)."""

_ONE_WISH_SECONDS = 1.0
"""`timeout` and shells signal a process and then its group: the same signal again so soon is the same wish."""


class Interrupted(BaseException):
    """A signal came inside `Interruption.raising()`. No Exception, so that nothing in between takes it for a fault."""


class Interruption:
    """The signals of this process while entered (on the main thread; elsewhere none are heard).

    Outside of the two contexts the first signal ends the process at once, after `leave` has written what an
    interrupted run leaves: nothing was done yet that would be lost. Inside `orderly()` it is kept in `number` for the
    run to look at; inside `raising()` it also raises Interrupted in the main thread. A second signal (another one, or
    the same a second later) ends the process at once, wherever it is.
    """

    def __init__(self, leave: Callable[[int], object] = lambda number: None) -> None:
        self.number = 0
        """The first signal, 0 for none."""
        self.leave = leave
        self._orderly = False
        self._raising = False
        self._decision = threading.Lock()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)  # as set_wakeup_fd wants it
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            self._listener = threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True)
            self._listener.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pipe is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])
        self._listener.join()
        os.close(self._pipe[0])

    @contextlib.contextmanager
    def orderly(self) -> Iterator[None]:
        """While inside, the run looks at `number` and ends in order."""
        self._set_orderly(True)
        try:
            yield
        finally:
            self._set_orderly(False)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """While inside, itself inside `orderly()`, the first signal raises Interrupted in the main thread."""
        self._raising = True
        try:
            if self.number:
                raise Interrupted
            yield
        finally:
            self._raising = False

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after the others, each a request to end."""
        return EXIT_SIGINT if self.number == signal.SIGINT else EXIT_SIGTERM

    def _set_orderly(self, orderly: bool) -> None:
        with self._decision:  # not while a signal is being decided: the process may be about to end
            self._orderly = orderly

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs on the main thread, which may be past the context before the listening thread is."""
        if self._orderly:
            self.number = self.number or number
        if self._raising:
            self._raising = False
            raise Interrupted

    def _listen(self, descriptor: int) -> None:
        last, at = 0, 0.0
        while data := os.read(descriptor, 64):
            for number in data:
                if number not in SIGNALS or (number == last and time.monotonic() - at < _ONE_WISH_SECONDS):
                    continue
                self._decide(number, first=not last)
                last, at = number, time.monotonic()

    def _decide(self, number: int, first: bool) -> None:
        name = signal.Signals(number).name
        with self._decision:
            answered = self._orderly or self.number
            self.number = self.number or number
            if first and answered:
                _say(f"{name}: ending after the update in flight; once more ends at once")
                return
            if first:
                self.leave(number)
            _say(f"ended by {name}")
            os._exit(self.exit_status)


def _say(line: str) -> None:
    """A line on standard error; a terminal gets its cursor back, which a progress bar may have hidden."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    say(f"{show_cursor}{line}", sys.stderr)
