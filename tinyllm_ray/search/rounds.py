"""A round of a verification: the baseline and the finalists once each, one after the other, and what each left."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllm_ray.measure.bounds import window_error
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.finalists import SUSTAINED_SECONDS, Predict
from tinyllm_ray.search.noise import Spread, device_name
from tinyllm_ray.search.pairs import Side
from tinyllm_ray.search.rates import rate

SHORT_WARMUP_UPDATES = 8
"""Of short processes at most: a graph of the whole update is captured in the fourth, and three steady ones follow."""

WINDOW_SHARE = 0.7
"""Windows noisier than processes are measured until their error is this share of the spread between processes."""


@dataclass
class Round:
    """One round; any two of its sides are a pair."""

    number: int
    order: list[str]
    """Execution identities, as they are to run."""
    protocol: Protocol
    sides: dict[str, Side] = field(default_factory=dict)
    """By execution identity, of those that have been measured."""

    @property
    def sustained(self) -> bool:
        return self.protocol.least_seconds >= SUSTAINED_SECONDS


def whole_rounds(records: Iterable[TrialRecord], known: Mapping[str, TrialRecord]) -> list[Round]:
    """The rounds of an interrupted verification that hold two or more of these executions on one device each."""
    found: dict[int, dict[str, TrialRecord]] = {}
    for record in records:
        usable = record.purpose == "verification" and record.fate == Fate.COMPLETE and rate(record) is not None
        if usable and record.round is not None and record.execution_identity in known:
            found.setdefault(record.round, {})[record.execution_identity] = record
    rounds = []
    for number, results in sorted(found.items()):
        devices = {device_name(record) for record in results.values()}
        protocols = {record.protocol for record in results.values()}
        protocol = next(iter(protocols))
        if len(results) > 1 and len(devices) == 1 == len(protocols) and protocol is not None:
            sides = {name: side_of(record) for name, record in results.items()}
            rounds.append(Round(number, list(results), protocol, sides))
    return rounds


def pairs_seconds(count: int, expected: Sequence[float], upper: Sequence[float]) -> float:
    """What so many rounds of processes have to have left to be begun: all as expected but for the last process, which
    has to be started. By what none exceeds, few small budgets would do."""
    return count * sum(expected) + max(upper) - min(expected)


def short_rounds(
    protocol: Protocol, count: int, executions: Sequence[Mapping[str, Any]], expect: Predict, predict: Predict
) -> tuple[Protocol, float]:
    """The protocol of rounds of these executions that are to be short, and what so many have to have left."""
    short = shortest(protocol)
    expected, upper = ([seconds(execution, short) for execution in executions] for seconds in (expect, predict))
    return short, pairs_seconds(count, expected, upper)


def shortest(protocol: Protocol) -> Protocol:
    """The protocol of processes that are to be short: three windows of half a second once updates are steady."""
    return Protocol(
        version="adaptive",
        data_mode=protocol.data_mode,
        warmup_updates=min(protocol.warmup_updates, SHORT_WARMUP_UPDATES),
        windows=3,
        most_windows=3,
    )


def loaded(protocol: Protocol, seconds: float) -> Protocol:
    """The protocol of processes whose windows last so long together."""
    return Protocol(
        version="adaptive",
        data_mode=protocol.data_mode,
        warmup_updates=protocol.warmup_updates,
        least_seconds=seconds,
    )


def home_of(records: Iterable[TrialRecord], preferred: Iterable[str]) -> str | None:
    """The device to verify on in a study of several, None in others: where the first of `preferred` (by execution
    identity) was measured, as its compilation is cached there."""
    records = [record for record in records if record.devices]
    if len({device_name(record) for record in records}) < 2:
        return None
    ran = {record.execution_identity: device_name(record) for record in records}
    return next((ran[name] for name in preferred if name in ran), None)


def noise_of(record: TrialRecord) -> list[tuple[float, float]]:
    """The error that the record's windows leave, and their seconds in all; nothing where there are no windows."""
    rates = [window.targets_per_second for window in record.windows]
    return [(window_error(rates), sum(window.seconds for window in record.windows))] if rates else []


def long_enough(noise: Sequence[tuple[float, float]], spread: Spread) -> float:
    """Seconds of windows after which their error is a part of the spread between processes; 0 if it always is.

    `noise` is that of all processes of an execution (`noise_of`).
    """
    # The median over them, as an interrupted window makes a single one look noisy.
    if not noise or statistics.median(error for error, _ in noise) <= spread.value:
        return 0.0
    return statistics.median(error**2 * seconds for error, seconds in noise) / (WINDOW_SHARE * spread.value) ** 2


def side_of(record: TrialRecord) -> Side:
    """One process of a pair; the record has to have a throughput."""
    rates = [window.targets_per_second for window in record.windows]
    measured = rate(record)
    assert measured is not None
    return Side(measured, window_error(rates) if rates else math.nan)
