"""The table of a study, for a terminal of any size: what does not fit is counted instead of cut."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
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


_STATE_WIDTH, _RATE_WIDTH, _RATIO_WIDTH, _SECONDS_WIDTH, _GAP = 13, 10, 8, 5, 2
_WIDE = 60
"""Columns from which on state, throughput, ratio and seconds stand beside a label that can be told from others."""
_LEAST_LABEL, _LEAST_DETAIL = 16, 10


def render(view: View, width: int = 100, height: int = 1000) -> Group:
    """The table of a study; no line is wider than `width`, and it has `height` lines at most, 4 where that is less.

    Where not all candidates fit, those that run come first, then baseline, fastest and what ended last.
    """
    left = f"{format_duration(view.seconds_left)} left"
    head = Text(f"{left}   {view.title}", style="bold", no_wrap=True, overflow="ellipsis")
    room = max(2, height - 2)
    rows = list(view.rows)
    shown = rows if len(rows) <= room else _most_telling(rows, room - 1)
    table = _wide_table(shown, width) if width >= _WIDE else _narrow_table(shown, width)
    left_out = Counter(row.state for row in rows) - Counter(row.state for row in shown)
    if not left_out:
        return Group(head, table)
    counts = ", ".join(f"{count} {state}" for state, count in left_out.items())
    more = Text(f"and {left_out.total()} more: {counts}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(head, table, more)


def plain(text: str) -> str:
    """Text of somebody else as one line without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def rate_words(row: Row) -> str:
    """Targets a second; empty where there are none."""
    return "" if row.targets_per_second is None else f"{row.targets_per_second:,.0f}"


def ratio_words(row: Row) -> str:
    """Beside the baseline; empty where nobody knows."""
    return "" if row.versus_baseline is None else f"{row.versus_baseline:.2f}x"


def _most_telling(rows: Sequence[Row], room: int) -> list[Row]:
    """So many of them, in their order."""
    measured = [row for row in rows if row.targets_per_second]
    fastest = max(measured, key=lambda row: row.targets_per_second or 0.0, default=None)
    ended = [row for row in rows if row.seconds is not None]
    running = [row for row in rows if row.state == "running"]
    order = [*running, *rows[:1], *([fastest] if fastest else []), *ended[::-1], *rows]
    chosen = {id(row): row for row in order}
    keep = set(list(chosen)[:room])
    return [row for row in rows if id(row) in keep]


def _wide_table(rows: Sequence[Row], width: int) -> Table:
    figures = _STATE_WIDTH + _RATE_WIDTH + _RATIO_WIDTH + _SECONDS_WIDTH + 4 * _GAP
    label_width = min(max((len(row.label) for row in rows), default=0), max(_LEAST_LABEL, width - figures))
    detail_width = width - label_width - figures - _GAP
    table = _empty_table()
    table.add_column("candidate", no_wrap=True, overflow="ellipsis", width=label_width)
    table.add_column("state", no_wrap=True, width=_STATE_WIDTH)
    for name, columns in (("targets/s", _RATE_WIDTH), ("baseline", _RATIO_WIDTH), ("s", _SECONDS_WIDTH)):
        table.add_column(name, justify="right", no_wrap=True, width=columns)
    if detail_width >= _LEAST_DETAIL:
        table.add_column("", no_wrap=True, overflow="ellipsis", width=detail_width)
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        cells: list[str | Text] = [
            Text(row.label),
            _state(row),
            rate_words(row),
            ratio_words(row),
            seconds,
            Text(plain(row.detail)),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _narrow_table(rows: Sequence[Row], width: int) -> Table:
    """A candidate has its throughput, or its state where it has none."""
    label_width = max(1, width - _STATE_WIDTH - _RATIO_WIDTH - 2 * _GAP)
    table = _empty_table()
    table.add_column("candidate", no_wrap=True, overflow="ellipsis", width=label_width)
    for name, columns in (("targets/s", _STATE_WIDTH), ("baseline", _RATIO_WIDTH)):
        table.add_column(name, justify="right", no_wrap=True, width=columns)
    for row in rows:
        result = Text(rate_words(row), style=_style(row)) if row.targets_per_second else _state(row)
        table.add_row(Text(row.label), result, ratio_words(row))
    return table


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))


def _state(row: Row) -> Text:
    return Text(row.state, style=_style(row))


def _style(row: Row) -> str:
    return _STYLES.get(row.state, "dim")
