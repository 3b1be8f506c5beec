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
    last = time.monotonic()
    first: tuple[float, int] | None = None  # the first update compiles, so what is left is judged by those after it

    def draw(progress: RunProgress) -> None:
        nonlocal last, first
        now = time.monotonic()
        if progress.updates > 1 and progress.updates < progress.total_updates and now - last < _SECONDS_A_LINE:
            return
        last = now
        left = ""
        if first is None:
            first = now, progress.updates
        else:
            seconds = (now - first[0]) / (progress.updates - first[1]) * (progress.total_updates - progress.updates)
            left = f"  {format_duration(seconds)} left"
        counted = f"update {progress.updates}/{progress.total_updates}"
        print(f"{counted}  {_describe(progress)}{left}", file=sys.stderr, flush=True)

    return draw
