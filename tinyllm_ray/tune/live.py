"""What a person sees of a running study: a live table in a terminal, plain lines elsewhere. All on standard error."""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live

from tinyllm_ray.clock import format_duration
from tinyllm_ray.tune.table import Row, View, plain, rate_words, ratio_words, render


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
        figures = "" if row.targets_per_second is None else f"  {rate_words(row)} targets/s {ratio_words(row)}".rstrip()
        detail = f"  ({row.detail})" if row.detail else ""
        self.say(f"[{left} left] {row.label}: {row.state}{figures}{detail}")


class LiveTable:
    """A table that is drawn again twice a second, for as long as the terminal is there."""

    def __init__(self, console: Console, look: Callable[[], View]) -> None:
        self._look = look
        self._console = console
        self._live = Live(console=console, refresh_per_second=2, get_renderable=self._render)

    def __enter__(self) -> "LiveTable":
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        say(self._console, text)

    def show(self, row: Row) -> None:
        with contextlib.suppress(OSError):
            self._live.refresh()

    def _render(self) -> Group:
        return render(self._look(), self._console.width, self._console.height - 1)


def say(console: Console, text: str) -> None:
    """One line, whatever the width, without control characters.

    A reader that is gone ends no study, nor does a log that cannot be written: a full disk, a folder that is away.
    """
    with contextlib.suppress(OSError):
        console.print(plain(text), soft_wrap=True, markup=False, highlight=False)


def open_display(console: Console, look: Callable[[], View]) -> AbstractContextManager[Display]:
    """The display that fits `console`; `look` gives the study as it stands and is called from another thread."""
    return LiveTable(console, look) if _can_draw_again(console) else PlainLines(console, look)


def _can_draw_again(console: Console) -> bool:
    """FORCE_COLOR makes rich take a log file for a terminal; what is drawn again there is a heap of control codes."""
    forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))
    return console.is_terminal and not console.is_dumb_terminal and (not forced or console.file.isatty())
