"""Progress of a long preparation on stderr: a bar in a terminal, plain lines elsewhere, or nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Report = Callable[[str, int, int | None], None]
"""Called as report(stage, done, total); total is None where it is not known."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Reports nothing."""


@contextlib.contextmanager
def reporter(title: str) -> Iterator[Report]:
    """A report that shows itself under `title` while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        yield _lines(title)


def _lines(title: str) -> Report:
    """One line a stage: logs are read afterwards."""
    shown: set[str] = set()

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in shown:
            shown.add(stage)
            print(f"{title}: {stage}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    console.print(title, highlight=False, soft_wrap=True)  # not in the bars: a path would leave them no room
    with Progress(*columns, console=console, transient=True) as progress:

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, count="")
            count = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
            progress.update(tasks[stage], completed=done, total=total, count=count)

        yield report
