"""Which of the measured executions is the one to use, noise and ties considered."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.cost import compilation

START_NOISE_SECONDS, START_NOISE_SHARE = 1.0, 0.25
"""Starts this close count as equal: warm first updates of one mode differed by 0.8 s on a GH200 (2.8 to 3.6 s), cold
ones on an H200 by 20% (18.8 to 22.6 s in one study)."""

MEMORY_NOISE_SHARE = 0.05
"""Memory this close counts as equal: a few percent are a matter of the allocator's rounding."""


@dataclass(frozen=True)
class Selection:
    """The verdict."""

    record: TrialRecord
    ties: tuple[TrialRecord, ...]
    """The others that cannot be told from the fastest, fastest first."""
    reason: str
    """On one line, for people."""


def rate(record: TrialRecord) -> float | None:
    """Targets a second that can be compared; None where the trial measured none."""
    value = record.targets_per_second
    return value if value is not None and math.isfinite(value) and value > 0 else None


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The complete records that have a throughput, fastest first, equals in the order given."""
    complete = [record for record in records if record.fate == Fate.COMPLETE and rate(record) is not None]
    return sorted(complete, key=_rate, reverse=True)


def fastest(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The complete record with the highest median throughput, the earlier one of two equals."""
    return next(iter(ranked(records)), None)


def select(records: Iterable[TrialRecord], baseline: str | None = None) -> Selection | None:
    """The verdict among complete records: the fastest, or one of those within its noise.

    Records are a tie with the fastest when they differ from it by no more than the larger of the two half-ranges of
    windows. Of a tie the smallest start plus compilation wins, of equal starts the smallest memory, of equal memory
    the baseline (its execution identity), which there is no reason to leave, else the fastest. Nothing that measured
    slower than the baseline is taken: on a noisy machine a tie is wide.
    """
    records = list(records)
    order = ranked(records)
    if not order:
        return None
    top = order[0]
    tied = [record for record in order if _rate(top) - _rate(record) <= max(_half_range(top), _half_range(record))]
    least = max((_rate(record) for record in order if record.execution_identity == baseline), default=0.0)
    worthy = [record for record in tied if _rate(record) >= least]
    chosen, quick, small = break_tie(worthy, records, baseline)
    others = tuple(record for record in tied if record is not chosen)
    if not others:
        why = _lead(chosen, order)
    elif chosen is top and len(small) == len(tied):
        why = "the fastest of them"
    elif len(small) > 1 and chosen.execution_identity == baseline:
        why = "the baseline, and nothing is shown to be faster"
    elif len(small) > 1:
        why = "the fastest of those that start as soon and need as little memory"
    else:
        why = "it starts sooner" if len(quick) == 1 else "it needs less memory"
    return Selection(chosen, others, _reason(chosen, top, others, why))


def break_tie(
    tied: list[TrialRecord], records: Iterable[TrialRecord], baseline: str | None
) -> tuple[TrialRecord, list[TrialRecord], list[TrialRecord]]:
    """Which of `tied` (the preferred first) to use, those that start as soon as any, and of these the small ones.

    Starts are those that all `records` of the study show.
    """
    starts = start_seconds(records)
    soonest = min(starts[record.execution_identity] for record in tied)
    limit = soonest * (1 + START_NOISE_SHARE) + START_NOISE_SECONDS
    quick = [record for record in tied if starts[record.execution_identity] <= limit]
    smallest = min(memory_bytes(record) for record in quick) * (1 + MEMORY_NOISE_SHARE)
    small = [record for record in quick if memory_bytes(record) <= smallest]
    return next((record for record in small if record.execution_identity == baseline), small[0]), quick, small


def start_seconds(records: Iterable[TrialRecord]) -> dict[str, float]:
    """By execution identity: start and first update, the compilation cold.

    Records that share a compilation count with the longest first update any of them had: which of them found it in
    the cache is a matter of the study's order. Infinite where unknown, so that it never wins a tie by that.
    """
    records = list(records)
    first: dict[tuple[Any, ...], float] = {}
    for record in records:
        seconds = record.seconds.compile if record.seconds.compile is not None else record.first_update_seconds
        if seconds is not None:
            made = compilation(record.execution)
            first[made] = max(first.get(made, 0.0), seconds)
    return {
        record.execution_identity: (record.seconds.start or 0.0) + first.get(compilation(record.execution), math.inf)
        for record in records
    }


def memory_bytes(record: TrialRecord) -> float:
    """Peak memory; what the allocator reserved rather than allocated, which leaves out the pools of CUDA graphs."""
    memory = record.memory
    known = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.used_bytes
    return math.inf if known is None else float(known)


def _rate(record: TrialRecord) -> float:
    return rate(record) or 0.0


def _half_range(record: TrialRecord) -> float:
    """Targets a second; 0 where one window says nothing about noise."""
    spread = record.spread
    return spread * _rate(record) if spread is not None and math.isfinite(spread) else 0.0


def _lead(chosen: TrialRecord, order: list[TrialRecord]) -> str:
    if len(order) == 1:
        return "the only complete candidate"
    return f"{_rate(chosen) / _rate(order[1]) - 1:.1%} ahead of {order[1].candidate}"


def _reason(chosen: TrialRecord, top: TrialRecord, others: tuple[TrialRecord, ...], why: str) -> str:
    if not others:
        return f"fastest with {_rate(chosen):,.0f} targets/s, {why}"
    names = ", ".join(record.candidate for record in others)
    return f"within the noise of {names} (highest {_rate(top):,.0f} targets/s); {why}"
