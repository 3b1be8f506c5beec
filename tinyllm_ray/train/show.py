"""What a person sees of a run: a progress bar in a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tinyllm_ray.clock import format_duration
from tinyllm_ray.train.run import Progress as RunProgress

_SECONDS_A_LINE = 10.0


@contextmanager
def progress_line() -> Iterator[Callable[[RunProgress], None]]:
    """A function to call with every progress; it draws on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("first update", total=None)

        def draw(progress: RunProgress) -> None:
            bar.update(task, total=progress.total_updates, completed=progress.updates, description=_describe(progress))

        yield draw


def _describe(progress: RunProgress) -> str:
    return f"loss {progress.loss:.4f}  {progress.targets_per_second:,.0f} targets/s"


def _plain_lines() -> Callable[[RunProgress], None]:
    began = last = time.monotonic()

    def draw(progress: RunProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.updates > 1 and progress.updates < progress.total_updates and now - last < _SECONDS_A_LINE:
            return
        last = now
        left = (now - began) / progress.updates * (progress.total_updates - progress.updates)
        print(
            f"update {progress.updates}/{progress.total_updates}  {_describe(progress)}  {format_duration(left)} left",
            file=sys.stderr,
            flush=True,
        )

    return draw
