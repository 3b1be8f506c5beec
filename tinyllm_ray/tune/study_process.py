"""The study's process: checks what was asked, runs it, and answers the supervisor that started it.

A mistake is found before Ray and PyTorch are imported, so that it is said within a second and leaves nothing behind.
"""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from tinyllm_ray.clock import Deadline
from tinyllm_ray.errors import EXIT_BUG, EXIT_NO_RESULT, TinyllmRayError
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.tune.channel import Channel, attach
from tinyllm_ray.tune.folder import open_folder
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.request import Interrupted, StudyRequest, check_request
from tinyllm_ray.tune.supervisor import process_age_seconds


def main() -> int:
    """Run the study asked for; the exit status is also the verdict sent."""
    channel = attach()
    console = Console(stderr=True)
    status, message = EXIT_BUG, None
    try:
        with _signals_raise():
            status = _run(channel, console)
    except Interrupted as interruption:
        status, message = EXIT_NO_RESULT, f"{interruption}, before anything was measured"
        say(console, message)
    except TinyllmRayError as error:
        status, message = error.exit_status, str(error)
        say(console, f"error: {message}")
    except Exception as error:  # our own fault: the traceback is for us, the verdict for the supervisor
        message = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    channel.send("done", exit_status=status, message=message)
    return status


def _run(channel: Channel, console: Console) -> int:
    request = StudyRequest.model_validate(channel.request)
    deadline = Deadline.after(request.budget_seconds - process_age_seconds())
    asked = check_request(request)
    out = Path(request.out).resolve()
    earlier = open_folder(out, request.resume)
    if asked.config is not None and asked.space is not None:
        # A GPU runs whatever any machine runs: what does not fit there is refused before Ray takes its seconds.
        fit_space(asked.space, asked.config, "cuda", usable_cores())

    from tinyllm_ray.tune.study_run import run_study

    return run_study(request, asked, earlier, out, channel, console, deadline)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """While entered, SIGTERM and SIGINT raise `Interrupted` once in the main thread; later ones change nothing."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    yield


if __name__ == "__main__":
    sys.exit(main())
