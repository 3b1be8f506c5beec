"""What a person sees of a running study: a live table in a terminal, plain lines elsewhere. All on standard error."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinyllm_ray.clock import format_duration

_STYLES = {
    "complete": "green",
    "running": "bold cyan",
    "failed": "red",
    "out_of_memory": "red",
    "invalid": "red",
    "timed_out": "yellow",
    "lost": "yellow",
}

_FIGURES_WIDTH = 13 + 10 + 8 + 4 + 4 * 2
"""Of the columns beside the label, gaps included."""


@dataclass(frozen=True)
class Row:
    """One candidate as shown."""

    candidate: str
    label: str
    state: str
    """A fate, `running`, `pending`, `skipped` or `not started`."""
    detail: str
    """The stage of a running candidate, the reason of a fate."""
    targets_per_second: float | None
    versus_baseline: float | None
    """Throughput divided by the baseline's."""
    seconds: float | None
    """What the candidate took from request to record."""
    compile_seconds: float | None = None
    """Its first update, which includes compilation."""


@dataclass(frozen=True)
class View:
    """A study at one moment."""

    title: str
    rows: Sequence[Row]
    seconds_left: float


class Display(Protocol):
    """Shows a study while it goes on."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def show(self, row: Row) -> None:
        """A candidate has started or ended."""


class PlainLines:
    """A line when something happens, for log files and pipes."""

    def __init__(self, console: Console, look: Callable[[], View]) -> None:
        self._console = console
        self._look = look

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is held."""

    def say(self, text: str) -> None:
        say(self._console, text)

    def show(self, row: Row) -> None:
        left = format_duration(self._look().seconds_left)
        figures = "" if row.targets_per_second is None else f"  {_rate(row)} targets/s {_ratio(row)}".rstrip()
        detail = f"  ({row.detail})" if row.detail else ""
        self.say(f"[{left} left] {row.label}: {row.state}{figures}{detail}")


class LiveTable:
    """A table that is drawn again twice a second."""

    def __init__(self, console: Console, look: Callable[[], View]) -> None:
        self._look = look
        self._console = console
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self._render)

    def __enter__(self) -> "LiveTable":
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        say(self._console, text)

    def show(self, row: Row) -> None:
        self._live.refresh()

    def _render(self) -> Group:
        return render(self._look(), self._console.width)


def say(console: Console, text: str) -> None:
    """One line as it is, whatever the width; a reader that is gone ends no study."""
    with contextlib.suppress(BrokenPipeError):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def open_display(console: Console, look: Callable[[], View]) -> AbstractContextManager[Display]:
    """The display that fits `console`; `look` gives the study as it stands and is called from another thread."""
    return (
        LiveTable(console, look) if console.is_terminal and not console.is_dumb_terminal else PlainLines(console, look)
    )


def render(view: View, width: int = 100) -> Group:
    """The table of a study, for terminals from 60 columns on; reasons are cut to what is left of the width."""
    table = Table(box=None, pad_edge=False)
    label_width = min(max((len(row.label) for row in view.rows), default=0), max(16, width - _FIGURES_WIDTH))
    detail_width = width - label_width - _FIGURES_WIDTH - 2
    table.add_column("candidate", no_wrap=True, overflow="ellipsis", width=label_width)
    table.add_column("state", no_wrap=True, width=13)
    for name, columns in (("targets/s", 10), ("baseline", 8), ("s", 4)):
        table.add_column(name, justify="right", no_wrap=True, width=columns)
    if detail_width >= 10:
        table.add_column("", no_wrap=True, overflow="ellipsis", width=detail_width)
    for row in view.rows:
        state = Text(row.state, style=_STYLES.get(row.state, "dim"))
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        cells: list[str | Text] = [row.label, state, _rate(row), _ratio(row), seconds, row.detail]
        table.add_row(*cells[: len(table.columns)])
    head = Text(f"{view.title}   {format_duration(view.seconds_left)} left", style="bold")
    return Group(head, table)


def _rate(row: Row) -> str:
    return "" if row.targets_per_second is None else f"{row.targets_per_second:,.0f}"


def _ratio(row: Row) -> str:
    return "" if row.versus_baseline is None else f"{row.versus_baseline:.2f}x"
