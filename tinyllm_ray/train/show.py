"""What a person sees of a run: progress bars in a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tinyllm_ray.clock import Clock, format_duration
from tinyllm_ray.train.progress import Evaluating, Event, OnProgress, Progress, Starting

_SECONDS_A_LINE = 10.0


class PipeConsole(Console):
    """A console that raises BrokenPipeError where its reader is gone, as every stream does; rich ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # the error that rich handles where it calls this


@contextmanager
def progress_line(console: Console | None = None, clock: Clock = time.monotonic) -> Iterator[OnProgress]:
    """A function to call with every event; it draws on `console`, standard error unless another is given."""
    console = console or PipeConsole(stderr=True)
    if not console.is_terminal:
        yield _unless_closed(_Lines(console, clock))
        return
    # No markup: a stage's or a split's name is text.
    text, count = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}", markup=False)
    with RichProgress(text, BarColumn(), count, TimeRemainingColumn(), console=console, get_time=clock) as bars:
        yield _unless_closed(_Bars(bars, clock))


def _unless_closed(show: OnProgress) -> OnProgress:
    """A pipe that is closed, or a terminal that went away, ends the display and not what it shows."""
    closed = False

    def showing(event: Event) -> None:
        nonlocal closed
        if closed:
            return
        try:
            show(event)
        except (OSError, ValueError):  # ValueError: writing to a file that Python has closed
            closed = True

    return showing


class _Pace:
    """How fast something goes, judged by what came after its first report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def per_second(self, done: int) -> float | None:
        """None as long as nothing was done since the first report."""
        now = self._clock()
        if self._first is None:
            self._first = now, done
        seconds, more = now - self._first[0], done - self._first[1]
        return more / seconds if more > 0 and seconds > 0 else None


class _Evaluations:
    """Texts of evaluations that come one after another, each with a pace of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._name = ""
        self._targets = 0
        self._pace = _Pace(clock)

    def describe(self, event: Evaluating, left: bool) -> str:
        """Name, share, targets a second and, if `left`, the time left."""
        if event.name != self._name or event.targets < self._targets:
            self._pace = _Pace(self._clock)
        self._name, self._targets = event.name, event.targets
        rate = self._pace.per_second(event.targets)
        parts = [f"{event.name} {event.targets / event.total_targets:.0%}"]
        if rate is not None:
            parts.append(f"{rate:,.0f} targets/s")
            if left:
                parts.append(f"{format_duration((event.total_targets - event.targets) / rate)} left")
        return "  ".join(parts)


class _Lines:
    """For logs: every stage of the start, the first update and the last, and a line every ten seconds between."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._said_at = clock()
        self._trained = False
        self._training = _Pace(clock)  # the first update compiles, so what is left is judged by those after it
        self._evaluations = _Evaluations(clock)

    def __call__(self, event: Event) -> None:
        due = self._clock() - self._said_at >= _SECONDS_A_LINE
        match event:
            case Starting(stage):
                self._say(f"starting: {stage}")
            case Progress():
                line = self._describe(event)
                if due or not self._trained or event.updates == event.total_updates:
                    self._say(line)
                self._trained = True
            case Evaluating():
                line = self._evaluations.describe(event, left=True)
                if due:
                    self._say(line)

    def _describe(self, event: Progress) -> str:
        line = f"update {event.updates}/{event.total_updates}  {_describe(event)}"
        rate, left = self._training.per_second(event.updates), event.total_updates - event.updates
        return f"{line}  {format_duration(left / rate)} left" if rate and left else line

    def _say(self, line: str) -> None:
        self._said_at = self._clock()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Bars:
    """For terminals: a bar of training, and below it one of the evaluation that it waits for."""

    def __init__(self, bars: RichProgress, clock: Clock) -> None:
        self._bars = bars
        self._training = bars.add_task("starting", total=None, count="")
        self._evaluation: tuple[str, TaskID] | None = None
        self._evaluations = _Evaluations(clock)

    def __call__(self, event: Event) -> None:
        match event:
            case Starting(stage):
                self._bars.update(self._training, description=f"starting: {stage}")
            case Progress(updates, total, _, _):
                self._end_evaluation()
                count = f"{updates}/{total}"
                self._bars.update(
                    self._training, description=_describe(event), completed=updates, total=total, count=count
                )
            case Evaluating(name, targets, total):
                text = self._evaluations.describe(event, left=False)
                if self._evaluation is None or self._evaluation[0] != name:
                    self._end_evaluation()
                    self._evaluation = name, self._bars.add_task(text, total=total, count="")
                self._bars.update(self._evaluation[1], description=text, completed=targets)
                if targets >= total:
                    self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation[1])
            self._evaluation = None


def _describe(event: Progress) -> str:
    return f"loss {event.loss:.4f}  {event.targets_per_second:,.0f} targets/s"
