"""A table for the replay, and a machine that measures its executions under a simulated clock.

A table knows, for each execution, its true throughput, how its windows scatter, and what its first update takes cold
and warm. The machine keeps a compile cache and resamples the noise.
"""

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.measure.need import Bar, is_enough, updates_to_fill, why_dominated
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, Memory, Seconds, TrialRecord, Window
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.cost import USUAL_WARMUP
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.kinds import compilation

PROCESS_NOISE = 0.004
"""Standard deviation of the same execution from process to process, as a share of its throughput."""

TOTAL_MEMORY = 141 * 10**9


@dataclass(frozen=True)
class Row:
    """What one execution does."""

    rate: float
    deviations: tuple[float, ...] = (-0.005, 0.0, 0.005)
    """Of its windows from their median, as shares."""
    cold: float = 20.0
    """Seconds of the first update, its compilation not cached."""
    warm: float = 3.5
    fate: Fate = Fate.COMPLETE
    memory: float = 8e9


@dataclass(frozen=True)
class Table:
    """A space, and what each of its executions does."""

    name: str
    space: FittedSpace
    row: Callable[[Mapping[str, Any]], Row]
    tokens: float
    """Of the recipe."""
    without: tuple[str, ...] = ()
    """Machines whose figures went into the table: their priors are left out."""
    start: float = 0.7
    rest: float = 0.3
    known: dict[str, Row] = field(default_factory=dict, repr=False)

    def __getitem__(self, execution: Mapping[str, Any]) -> Row:
        name = identity(execution)
        if name not in self.known:
            self.known[name] = self.row(execution)
        return self.known[name]

    def measuring_seconds(self, execution: Mapping[str, Any], cold: bool = False) -> float:
        """Seconds of a process that measures an execution, noise left out."""
        row, protocol = self[execution], self.space.protocol
        updates = protocol.warmup_updates - 1 + protocol.windows * protocol.updates_per_window
        first = row.cold if cold else row.warm
        return self.start + first + updates * self.space.targets_per_update / row.rate + self.rest

    def verifying_seconds(self, execution: Mapping[str, Any]) -> float:
        """Seconds of three pairs of fresh processes with the baseline; none for the baseline itself."""
        base = self.space.baseline
        return 0.0 if execution == base else 3 * (self.measuring_seconds(execution) + self.measuring_seconds(base))

    def training_seconds(self, execution: Mapping[str, Any] | None, tokens: float, runs: int = 1) -> float:
        """Seconds of trainings that find their compilation cached; of the baseline where nothing was chosen.

        A row inside the A/A band of the best counts as the best.
        """
        row = self[self.space.baseline if execution is None else execution]
        rate = self.best_row.rate if row.rate >= (1 - self.band) * self.best_row.rate else row.rate
        return runs * (self.start + row.warm + tokens / rate)

    @functools.cached_property
    def best_row(self) -> Row:
        """The one with the highest true throughput."""
        rows = [self[execution] for execution in self.space.executions()]
        return max((row for row in rows if row.fate == Fate.COMPLETE), key=lambda row: row.rate)

    @functools.cached_property
    def band(self) -> float:
        """The A/A band: by what share of the best throughput two measurements of it differ in one of ten."""
        dice, row = random.Random("band"), self.best_row

        def measured() -> float:
            windows = [dice.choice(row.deviations) for _ in range(self.space.protocol.windows)]
            return dice.gauss(0, PROCESS_NOISE) + statistics.median(windows)

        return sorted(abs(measured() - measured()) for _ in range(4000))[3600]


class Machine:
    """Measures under a simulated clock."""

    def __init__(self, table: Table, seed: int) -> None:
        self.table, self.dice = table, random.Random(f"{table.name} {seed}")
        self.compiled: set[tuple[Any, ...]] = set()

    def measure(
        self,
        execution: Mapping[str, Any],
        protocol: Protocol | None = None,
        candidate: str | None = None,
        bar: Bar | None = None,
    ) -> TrialRecord:
        """The record of a fresh process; its `seconds.total` is what the clock moves by.

        Under an adaptive protocol it is stopped where it cannot reach `bar`.
        """
        table, dice = self.table, self.dice
        row, protocol = table[execution], protocol or table.space.protocol
        made = make_candidate(1, execution)
        start, rest = (seconds * dice.uniform(0.9, 1.2) for seconds in (table.start, table.rest))
        first = (row.warm if compilation(execution) in self.compiled else row.cold) * math.exp(dice.gauss(0, 0.08))
        if row.fate != Fate.COMPLETE:
            seconds = Seconds(start=start, total=start + 0.5 * first + rest)
            return _record(candidate or made.id, made.execution, made.execution_identity, row.fate, seconds=seconds)
        self.compiled.add(compilation(execution))
        process = row.rate * math.exp(dice.gauss(0, PROCESS_NOISE))
        update = table.space.targets_per_update / process
        if protocol.version == 2:
            rates = [process * (1 + dice.choice(row.deviations)) for _ in range(protocol.windows)]
            windows = [self._window(index, protocol.updates_per_window, rate) for index, rate in enumerate(rates)]
            dominated, warmup = None, update * (protocol.warmup_updates - 1)
        else:
            windows, dominated = self._by_need(process, row, protocol, bar or Bar())
            warmup = update * min(USUAL_WARMUP, protocol.warmup_updates - 1)
        timed = sum(window.seconds for window in windows)
        total = start + first + warmup + timed + rest
        middle = statistics.median(window.targets_per_second for window in windows)
        return _record(
            candidate or made.id,
            made.execution,
            made.execution_identity,
            Fate.DOMINATED if dominated else Fate.COMPLETE,
            protocol=protocol,
            windows=windows,
            targets_per_second=middle,
            seconds_per_update=table.space.targets_per_update / middle,
            seconds=Seconds(start=start, compile=first, warmup=warmup, windows=timed, total=total),
            memory=Memory(peak_reserved_bytes=int(row.memory), total_bytes=TOTAL_MEMORY),
        )

    def _by_need(self, process: float, row: Row, protocol: Protocol, bar: Bar) -> tuple[list[Window], str | None]:
        """Windows as `measure.windows` takes them, and why they ended where the bar is out of reach.

        A window is noisier than those by count, which the row's deviations are of, by the root of their lengths.
        """
        update, rates, windows = self.table.space.targets_per_update / process, list[float](), list[Window]()
        updates = updates_to_fill(protocol.window_seconds, update)
        rough = math.sqrt(self.table.space.protocol.updates_per_window / updates)
        while True:
            rates.append(process * (1 + rough * self.dice.choice(row.deviations)))
            windows.append(self._window(len(windows), updates, rates[-1]))
            dominated = why_dominated(rates, bar)
            seconds = sum(window.seconds for window in windows)
            if dominated or is_enough(rates, updates * len(windows), seconds, bar, protocol):
                return windows, dominated

    def _window(self, index: int, updates: int, rate: float) -> Window:
        targets = updates * self.table.space.targets_per_update
        return Window.model_construct(
            index=index, updates=updates, targets=targets, seconds=targets / rate, targets_per_second=rate,
            data_wait_seconds=0.0, loss=None, grad_norm=None, timestamp=0.0,
        )  # fmt: skip


def _record(candidate: str, execution: Mapping[str, Any], name: str, fate: Fate, **fields: Any) -> TrialRecord:
    values = {
        "study": "replay",
        "candidate": candidate,
        "kind": "measurement",
        "fate": fate,
        "recipe_identity": "recipe",
        "execution_identity": name,
        "cache_identity": None,
        "source_identity": "source",
        "source_dirty": None,
        "execution": dict(execution),
        "timestamp": 0.0,
    }
    return TrialRecord.model_construct(**TrialRecord.model_validate(values).__dict__ | fields)
