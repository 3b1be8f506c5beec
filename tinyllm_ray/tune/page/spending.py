"""What each second of a study's budget went to, by device."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tinyllm_ray.records import Device, TrialRecord

STAGES: Final = ("process", "start", "compile", "warmup", "windows", "proof")
"""Of a trial, in order; `process` is all around the others: Ray, the fork, the process's end."""
IDLE: Final = "idle"
"""Before the first trial, between trials, after the last, and on a device that has none."""

_TIMED: Final = ("start", "compile", "warmup", "windows")


@dataclass(frozen=True)
class Slice:
    """One stage of one trial on one device."""

    device: str
    candidate: str
    stage: str
    began: float
    """Seconds of the budget before it."""
    seconds: float


@dataclass(frozen=True)
class Spending:
    """A budget and what was done with it."""

    budget_seconds: float | None
    elapsed_seconds: float
    slices: tuple[Slice, ...] = ()
    sums: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by device and stage, IDLE included; a device's add up to `elapsed_seconds`."""


def spending(records: Sequence[TrialRecord], summary: Mapping[str, Any]) -> Spending:
    """The budget's time line; a study without a summary lasted from its first trial to its last.

    Trials carry wall-clock times, the budget counts seconds: what the wall clock has more (a study that was ended and
    taken up again later) is cut out of the times when nothing ran, the longest first.
    """
    spans = sorted((record.timestamp, _end(record)) for record in records if record.seconds.total is not None)
    budget = summary.get("budget_seconds")
    if not spans:
        return Spending(budget, summary.get("elapsed_seconds") or 0.0)
    first, last = spans[0][0], max(end for _, end in spans)
    elapsed = summary.get("elapsed_seconds") or last - first
    cuts = _times_away(spans, max(0.0, last - first - elapsed))
    active = last - first - sum(seconds for _, seconds in cuts)
    written = summary.get("timestamp")
    after = min(max(0.0, written - last), elapsed - active) if written else 0.0
    lead = max(0.0, elapsed - active - after)
    known = {label for record in records for label in _labels(record)}
    # What ended before it had a device ran on the only one there is.
    unknown = known.pop() if len(known) == 1 else device_label(None)
    slices = tuple(
        Slice(device, record.candidate, stage, lead + _budget_time(began, first, cuts), seconds)
        for record in sorted(records, key=lambda record: record.timestamp)
        if record.seconds.total is not None
        for device in _labels(record) or [unknown]
        for stage, began, seconds in _stages(record)
    )
    return Spending(budget, elapsed, slices, _sums(slices, elapsed))


def device_label(device: Device | None) -> str:
    """A device as people know it: its name, its host, and the end of its UUID where it has one."""
    if device is None:
        return "unknown device"
    number = f" ({device.identifier[-4:]})" if device.identifier else ""
    return f"{device.name} on {device.host}{number}"


def _labels(record: TrialRecord) -> list[str]:
    return [device_label(device) for device in record.devices]


def _end(record: TrialRecord) -> float:
    return record.timestamp + (record.seconds.total or 0.0)


def _stages(record: TrialRecord) -> Iterable[tuple[str, float, float]]:
    """Stage, Unix time of its begin and seconds; without gaps from the request to the record."""
    total = record.seconds.total or 0.0
    known = [(name, getattr(record.seconds, name) or 0.0) for name in (*_TIMED, "proof")]
    around = max(0.0, total - sum(seconds for _, seconds in known))
    # The last window's end is the one moment of a trial whose time is known.
    before = around
    if record.windows:
        ahead = sum(seconds for name, seconds in known if name in _TIMED)
        before = min(around, max(0.0, record.windows[-1].timestamp - record.timestamp - ahead))
    moment = record.timestamp
    for name, seconds in (("process", before), *known, ("process", around - before)):
        if seconds > 0:
            yield name, moment, seconds
        moment += seconds


def _times_away(spans: Iterable[tuple[float, float]], excess: float) -> list[tuple[float, float]]:
    """Parts of the gaps between `spans` that add up to `excess`, as the Unix time of their end and their seconds."""
    gaps, reached = [], None
    for began, end in spans:
        if reached is not None and began > reached:
            gaps.append((began, began - reached))
        reached = end if reached is None else max(reached, end)
    cuts = []
    for end, seconds in sorted(gaps, key=lambda gap: -gap[1]):
        part = min(seconds, excess)
        excess -= part
        if part > 0:
            cuts.append((end, part))
    return cuts


def _budget_time(moment: float, first: float, cuts: Iterable[tuple[float, float]]) -> float:
    return moment - first - sum(seconds for end, seconds in cuts if end <= moment)


def _sums(slices: Sequence[Slice], elapsed: float) -> dict[str, dict[str, float]]:
    sums: dict[str, dict[str, float]] = {}
    by_device = sorted(slices, key=lambda one: one.device)
    for device, own in itertools.groupby(by_device, key=lambda one: one.device):
        stages = dict.fromkeys(STAGES, 0.0)
        for one in own:
            stages[one.stage] += one.seconds
        sums[device] = stages | {IDLE: max(0.0, elapsed - sum(stages.values()))}
    return sums
