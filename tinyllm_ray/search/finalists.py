"""Which executions are worth verifying, and the time that this takes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinyllm_ray.measure.bounds import Bounds
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.noise import Spread, record_bounds
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, LEAST_PAIRS, planned_rate
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.verdict import start_seconds

Predict = Callable[[Mapping[str, Any], Protocol], float]
"""Seconds that a process of this execution under this protocol hardly ever exceeds, its compilation warm."""

MOST_FINALISTS = 3
SUSTAINED_SECONDS = 60.0


def choose_finalists(
    records: Iterable[TrialRecord],
    baseline: str,
    spread: Spread = CAUTIOUS_SPREAD,
    most: int = MOST_FINALISTS,
    lags: Mapping[str, float] | None = None,
) -> list[str]:
    """Execution identities worth verifying: complete, and within the noise of the fastest; the baseline is left out.

    First the fastest, then the one that starts soonest, as it would win a tie, then by speed; over all planned
    trainings where `lags` say, by execution identity, how many seconds a target their starts take.
    """
    records, lags = list(records), lags or {}
    starts = start_seconds(records)
    known: dict[str, Bounds] = {}
    for name, record in first_complete(records).items():
        if found := record_bounds(record, spread):
            low, middle, high = (
                planned_rate(each, lags.get(name, 0.0)) for each in (found.low, found.rate, found.high)
            )
            known[name] = Bounds(low, middle, high)
    if not known:
        return []
    order = sorted(known, key=lambda name: known[name].rate, reverse=True)
    close = [name for name in order if known[name].high >= known[order[0]].low]
    soonest = min(close, key=lambda name: starts[name])
    names = dict.fromkeys([close[0], soonest, *close])
    return [name for name in names if name != baseline][:most]


def first_complete(records: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    """The search's first complete record of every execution; of a control's many the fastest would be a lucky one."""
    found: dict[str, TrialRecord] = {}
    for record in records:
        if record.purpose == "search" and record.fate == Fate.COMPLETE and rate(record) is not None:
            found.setdefault(record.execution_identity, record)
    return found


def reserve_seconds(predict: Predict, baseline: TrialRecord, finalist: TrialRecord, protocol: Protocol) -> float:
    """What a study keeps for verifying one finalist: three pairs, and the minute's load of both."""
    sustained = Protocol(version="adaptive", least_seconds=SUSTAINED_SECONDS)
    both = (baseline.execution, finalist.execution)
    return sum(LEAST_PAIRS * predict(execution, protocol) + predict(execution, sustained) for execution in both)
