"""Which of the measured executions is the one to use, noise and ties considered."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.kinds import compilation
from tinyllm_ray.search.objective import Objective, StartsOf
from tinyllm_ray.search.rates import noise_share, ranked, rate

THROUGHPUT = Objective()

START_NOISE_SECONDS, START_NOISE_SHARE = 1.0, 0.25
"""Starts this close count as equal: warm first updates of one mode differed by 0.8 s on a GH200 (2.8 to 3.6 s), cold
ones on an H200 by 20% (18.8 to 22.6 s in one study)."""

MEMORY_NOISE_SHARE = 0.05
"""Memory this close counts as equal: a few percent are a matter of the allocator's rounding."""

FREE_MEMORY_SHARE = 0.03
"""Of a device's memory: a trial of a minute that leaves less free may be a training of hours that runs out of it, as
the allocator's fragments add up."""


@dataclass(frozen=True)
class Selection:
    """The verdict."""

    record: TrialRecord
    ties: tuple[TrialRecord, ...]
    """The others that cannot be told from the fastest, fastest first."""
    reason: str
    """On one line, for people."""


def select(
    records: Iterable[TrialRecord],
    baseline: str | None = None,
    objective: Objective = THROUGHPUT,
    starts: StartsOf | None = None,
    expected: Callable[[TrialRecord], float] | None = None,
    doubt: Callable[[TrialRecord, TrialRecord], float] | None = None,
) -> Selection | None:
    """The verdict among complete records: the best by `objective`, or one of those within its noise.

    Records are a tie with the best when they differ from it by no more than the larger of the two half-ranges of
    windows and, where their devices differ, the `doubt` about the ratio of these. Of a tie those that leave memory
    free go before those that do not; then the smallest start plus compilation wins, of equal starts the smallest
    memory, of equal memory the baseline (its execution identity), which there is no reason to leave, else the highest
    `expected` throughput, which other records have a say in and luck has less, or without that the best measured.
    Nothing that measured worse than the baseline is taken: on a noisy machine a tie is wide. `starts`, like
    `CostModel.starts`, is needed where the objective counts seconds.
    """
    records = list(records)
    order = ranked(records)
    if not order:
        return None
    values = {id(record): _value(record, objective, starts) for record in order}
    order.sort(key=lambda record: values[id(record)])
    top = order[0]

    def is_tied(record: TrialRecord) -> bool:
        between = doubt(top, record) if doubt else 0.0
        return values[id(record)] - values[id(top)] <= _noise(top, record, objective, between)

    tied = [record for record in order if is_tied(record)]
    most = min((values[id(record)] for record in order if record.execution_identity == baseline), default=math.inf)
    worthy = [record for record in tied if values[id(record)] <= most]
    chosen, quick, small = break_tie(worthy, records, baseline, expected)
    others = tuple(record for record in tied if record is not chosen)
    why = _why(chosen, top, (tied, quick, small), baseline) if others else _lead(chosen, order, values, objective)
    return Selection(chosen, others, _reason(chosen, others, why, objective))


def _why(chosen: TrialRecord, top: TrialRecord, sieves: tuple[list[TrialRecord], ...], baseline: str | None) -> str:
    """Why this one of a tie; `sieves` are what was left after each rule."""
    tied, quick, small = sieves
    if chosen is top and len(small) == len(tied):
        return "the fastest of them"
    if fills_memory(top) and not fills_memory(chosen):
        return f"{top.candidate} {FULL}"
    if len(small) > 1 and chosen.execution_identity == baseline:
        return "the baseline, and nothing is shown to be faster"
    if chosen is small[0] and len(small) > 1:
        return "the fastest of those that start as soon and need as little memory"
    if len(small) > 1:
        return "what its settings did in other candidates speaks for it"
    return "it starts sooner" if len(quick) == 1 else "it needs less memory"


def break_tie(
    tied: list[TrialRecord],
    records: Iterable[TrialRecord],
    baseline: str | None,
    expected: Callable[[TrialRecord], float] | None = None,
) -> tuple[TrialRecord, list[TrialRecord], list[TrialRecord]]:
    """Which of `tied` (the preferred first) to use, those that start as soon as any, and of these the small ones.

    Those that fill the device's memory are left out, unless all do. Starts are those that all `records` of the study
    show; of several that are left after all rules the one for which `expected` gives most.
    """
    starts = start_seconds(records)
    tied = [record for record in tied if not fills_memory(record)] or tied
    soonest = min(starts[record.execution_identity] for record in tied)
    limit = soonest * (1 + START_NOISE_SHARE) + START_NOISE_SECONDS
    quick = [record for record in tied if starts[record.execution_identity] <= limit]
    smallest = min(memory_bytes(record) for record in quick) * (1 + MEMORY_NOISE_SHARE)
    small = [record for record in quick if memory_bytes(record) <= smallest]
    likely = max(small, key=expected) if expected and len(small) > 1 else small[0]
    return next((record for record in small if record.execution_identity == baseline), likely), quick, small


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


FULL = f"leaves less than {FREE_MEMORY_SHARE:.0%} of the memory free, which a long run may need"


def fills_memory(record: TrialRecord) -> bool:
    """Whether the record's peak came close to the device's end; False where that is not known."""
    memory = record.memory
    peak = max(memory.peak_reserved_bytes or 0, memory.used_bytes or 0)
    return memory.total_bytes is not None and peak > (1 - FREE_MEMORY_SHARE) * memory.total_bytes


def memory_bytes(record: TrialRecord) -> float:
    """Peak memory; what the allocator reserved rather than allocated, which leaves out the pools of CUDA graphs."""
    memory = record.memory
    known = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.used_bytes
    return math.inf if known is None else float(known)


def _value(record: TrialRecord, objective: Objective, starts: StartsOf | None) -> float:
    if objective.kind == "throughput":
        return -_rate(record)
    assert starts is not None, "an objective in seconds needs to know what a start takes"
    return objective.value(starts(record.execution), _rate(record))


def _noise(one: TrialRecord, other: TrialRecord, objective: Objective, doubt: float) -> float:
    return max(objective.noise(_rate(record), math.hypot(noise_share(record), doubt)) for record in (one, other))


def _rate(record: TrialRecord) -> float:
    return rate(record) or 0.0


def _lead(chosen: TrialRecord, order: list[TrialRecord], values: dict[int, float], objective: Objective) -> str:
    if len(order) == 1:
        return "the only complete candidate"
    second = order[1]
    if objective.kind == "throughput":
        return f"{_rate(chosen) / _rate(second) - 1:.1%} ahead of {second.candidate}"
    return f"{values[id(second)] - values[id(chosen)]:,.0f} s before {second.candidate}"


def _reason(chosen: TrialRecord, others: tuple[TrialRecord, ...], why: str, objective: Objective) -> str:
    best = "fastest" if objective.kind == "throughput" else f"soonest done with {_planned(objective)}"
    full = f"; it {FULL}" if fills_memory(chosen) else ""
    if not others:
        return f"{best} with {_rate(chosen):,.0f} targets/s, {why}{full}"
    names = ", ".join(f"{record.candidate} ({_rate(record):,.0f} targets/s)" for record in others)
    return f"within the noise of {names}; {why}{full}"


def _planned(objective: Objective) -> str:
    runs = "1 run" if objective.runs == 1 else f"{objective.runs} runs"
    return f"{runs} of {objective.tokens:,.0f} targets"
