"""The study's process: its main thread answers signals, a second one checks what was asked and runs it.

An exception that a signal raises inside Ray's compiled code comes out as another one, or not at all; so the main thread
does nothing but wait, and on a signal closes the study itself. Nothing outside the standard library is imported here
before the signals are watched.
"""

import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

from tinyllm_ray.command import mistaken_path, note
from tinyllm_ray.errors import EXIT_BUG, EXIT_NO_RESULT, EXIT_USER, TinyllmRayError
from tinyllm_ray.tune.channel import Channel, attach
from tinyllm_ray.tune.processes import STUDY_VARIABLE, end_processes
from tinyllm_ray.tune.supervisor import process_age_seconds

if TYPE_CHECKING:
    from tinyllm_ray.tune.session import Closing

_LOOK_SECONDS = 0.05
_DEADLINE_SLACK_SECONDS = 0.5
"""A SIGTERM this close to the end of the budget is the supervisor's."""


class Work:
    """The thread that runs the study, and what it has come to."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.session: Closing | None = None
        """There as soon as there is something to report."""
        self.verdict: tuple[int, str | None] | None = None
        """Exit status and message, once it is over."""
        self.thread = threading.Thread(target=self._run, name="study", daemon=True)

    def _run(self) -> None:
        status, message = EXIT_BUG, None
        try:
            from tinyllm_ray.tune.tasks import run

            status = run(self)
        except TinyllmRayError as error:
            status, message = error.exit_status, str(error)
        except BrokenPipeError:  # the supervisor is gone, and all ends with it
            pass
        except Exception as error:
            mistake = mistaken_path(error) if isinstance(error, OSError) and self.session is None else None
            if mistake is not None:
                status, message = EXIT_USER, mistake
            else:  # our own fault: the traceback is for us, the verdict for the supervisor
                message = f"{type(error).__name__}: {error}"
                note(traceback.format_exc().rstrip("\n"), sys.stderr)
        self.verdict = status, message


def main() -> int:
    """Run the study asked for; the exit status is also the verdict sent."""
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGHUP):  # the supervisor's to answer; Ray and the candidates inherit this
        signal.signal(number, signal.SIG_IGN)
    _listen(received)
    channel = attach()
    work = Work(channel)
    work.thread.start()
    while work.verdict is None and not received:
        work.thread.join(_LOOK_SECONDS)
        _listen(received)  # Ray puts a handler of its own in its place, which prints where the process stands
        if channel.alone:
            _end_alone()
    interrupted = work.verdict is None
    status, message = work.verdict or _interrupt(work, received[0])
    if message is not None:
        note(message if interrupted else f"error: {message}", sys.stderr)
    channel.send("done", exit_status=status, message=message)
    if interrupted:
        os._exit(status)  # the study's thread may be anywhere in Ray; the supervisor ends what Ray started
    return status


def _listen(received: list[int]) -> None:
    """Note signals in `received` instead of ending at them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))


def _end_alone() -> NoReturn:
    """The supervisor was killed: end all of the study, should its guard have been killed as well."""
    end_processes(os.environ[STUDY_VARIABLE], os.getpid(), patience_seconds=0.0, limit_seconds=5.0)
    os._exit(EXIT_BUG)


def _interrupt(work: Work, number: int) -> tuple[int, str | None]:
    """End the study where it stands."""
    request = work.channel.request
    at_deadline = process_age_seconds() > request["budget_seconds"] - _DEADLINE_SLACK_SECONDS
    reason = "the budget's end" if at_deadline else signal.Signals(number).name
    if work.session is not None:
        return work.session.close(reason, interrupted=True), None
    if at_deadline:
        return EXIT_NO_RESULT, (
            f"the budget of {request['budget']} ended before anything was measured: starting takes 5 to 12 s, the "
            "first candidate 10 s or more; give 60s or more"
        )
    return EXIT_NO_RESULT, f"ended by {reason} before anything was measured"


if __name__ == "__main__":
    sys.exit(main())
