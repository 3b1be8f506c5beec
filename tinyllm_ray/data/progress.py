"""Progress of a long preparation on stderr: a bar in a terminal, plain lines elsewhere, or nothing."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final, Protocol

from tinyllm_ray.clock import Clock, format_duration
from tinyllm_ray.command import note

_SECONDS_A_LINE: Final = 10.0


class Report(Protocol):
    """Called as report(stage, done, total); total is None where it is not known, `detail` is shown instead of both."""

    def __call__(self, stage: str, done: int, total: int | None, detail: str = "") -> None: ...


def silent(stage: str, done: int, total: int | None, detail: str = "") -> None:
    """Reports nothing."""


@contextlib.contextmanager
def reporter(title: str, clock: Clock = time.monotonic) -> Iterator[Report]:
    """A report that shows itself under `title` while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        yield _lines(title, clock)


def _lines(title: str, clock: Clock) -> Report:
    """A line when a stage begins, and now and then while it goes on: logs are read afterwards."""
    began: dict[str, tuple[float, int]] = {}
    said = 0.0

    def report(stage: str, done: int, total: int | None, detail: str = "") -> None:
        nonlocal said
        now = clock()
        if stage not in began:
            began[stage] = now, done
            note(f"{title}: {stage}", sys.stderr)
        elif now - said < _SECONDS_A_LINE:
            return
        else:
            note(f"{title}: {stage}: {_describe(now, done, total, detail, began[stage])}", sys.stderr)
        said = now

    return report


def _describe(now: float, done: int, total: int | None, detail: str, began: tuple[float, int]) -> str:
    parts = [detail or f"{done:,}" + (f" of {total:,}" if total else "")]
    if total:
        parts.append(f"{min(done / total, 1.0):.0%}")
        if done > began[1]:
            left = (now - began[0]) / (done - began[1]) * max(total - done, 0)
            parts.append(f"{format_duration(left)} left")
    return ", ".join(parts)


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    console.print(title, highlight=False, soft_wrap=True)  # not in the bars: a path would leave them no room
    with Progress(*columns, console=console, transient=True) as progress:

        def report(stage: str, done: int, total: int | None, detail: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, count="")
            count = detail or (f"{done:,} of {total:,}" if total else f"{done:,}" if done else "")
            progress.update(tasks[stage], completed=done, total=total, count=count)

        yield report
