"""What a study's measurements show: the speed-up, its cost and payback; factors, kernels, memory and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.controls import Controls
from tinyllm_ray.search.device_blocks import Control, DeviceBlocks, DeviceSpeed
from tinyllm_ray.search.noise import spread_of
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.verification import Verification
from tinyllm_ray.tune.page.spending import device_label

TOKENS: Final = (10**7, 10**8, 10**9, 10**10)
"""Training lengths that a winner is named for."""


@dataclass(frozen=True)
class Speedup:
    """How many times the baseline's throughput the selected execution has."""

    ratio: float
    low: float | None = None
    high: float | None = None
    """The ratio's 90% interval; None without a verification in pairs."""
    pairs: int = 0

    @property
    def shown(self) -> float | None:
        """The ratio, unless its interval leaves open whether anything is gained."""
        return self.ratio if self.low is None or self.low > 1 else None


@dataclass(frozen=True)
class Payback:
    """What the study cost, and after how long a training its saving is worth that."""

    device_seconds: float
    devices: int
    targets: float | None
    """Tokens trained until then; None where nothing is saved."""
    training_seconds: float | None
    """How long the selected execution takes for them, on one device."""


@dataclass(frozen=True)
class Winner:
    """The execution that is done first with trainings of so many tokens, starts and compilation included."""

    tokens: int
    candidate: str
    seconds: float
    baseline_seconds: float | None


@dataclass(frozen=True)
class Point:
    """A candidate's throughput under one value of a factor."""

    candidate: str
    targets_per_second: float


@dataclass(frozen=True)
class Factor:
    """A setting that candidates differ in, and what came of each of its values."""

    name: str
    values: tuple[tuple[str, tuple[Point, ...], str], ...]
    """The value, its candidates, the fastest first, and the fates of those without a figure."""


@dataclass(frozen=True)
class Pair:
    """The same figure of the baseline and the selected execution; None where it was not recorded."""

    name: str
    baseline: float | None
    selected: float | None


def speedup(
    records: Sequence[TrialRecord],
    baseline: TrialRecord | None,
    selected: TrialRecord | None,
    summary: Mapping[str, Any],
) -> Speedup | None:
    """From the verification's pairs where there are any, else from the search's figures."""
    if baseline is None or selected is None:
        return None
    told = summary.get("speedup")
    if isinstance(told, Mapping) and isinstance(told.get("ratio"), float):
        return Speedup(told["ratio"], told.get("low"), told.get("high"), told.get("pairs") or 0)
    finalists = {record.execution_identity for record in records if record.purpose == "verification"}
    if finalists and selected.execution_identity != baseline.execution_identity:
        spread = spread_of(records, CAUTIOUS_SPREAD)
        verification = Verification(
            records, baseline.execution_identity, sorted(finalists), lambda *_: 0.0, spread=spread
        )
        outcome = verification.outcome()
        verdict = outcome.verdicts.get(selected.execution_identity) if outcome else None
        if verdict:
            return Speedup(verdict.ratio, verdict.low, verdict.high, verdict.pairs)
    one, other = selected.targets_per_second, baseline.targets_per_second
    return Speedup(one / other) if one and other else None


def payback(
    elapsed_seconds: float, devices: int, baseline: TrialRecord | None, selected: TrialRecord | None, gain: float | None
) -> Payback:
    """`gain` is the selected execution's throughput over the baseline's; None where none is shown."""
    cost = elapsed_seconds * devices
    rate = baseline.targets_per_second if baseline else None
    if not rate or not selected or not gain or gain <= 1:
        return Payback(cost, devices, None, None)
    targets = cost / ((1 - 1 / gain) / rate)
    return Payback(cost, devices, targets, targets / (rate * gain))


def told_winners(summary: Mapping[str, Any]) -> tuple[Winner, ...]:
    """The study's own, which knows what compilations take cold and warm, and counts all trainings that are planned."""
    return tuple(
        Winner(one["tokens"], one["candidate"], one["seconds"], one.get("baseline_seconds"))
        for one in summary.get("winners") or ()
    )


def winners(complete: Sequence[TrialRecord], baseline: TrialRecord | None) -> tuple[Winner, ...]:
    """Who is done first with one training, for each of TOKENS; none where nothing has a figure."""
    found = []
    for tokens in TOKENS:
        timed = [(seconds, record) for record in complete if (seconds := training_seconds(record, tokens)) is not None]
        if timed:
            seconds, best = min(timed, key=lambda pair: pair[0])
            other = training_seconds(baseline, tokens) if baseline else None
            found.append(Winner(tokens, best.candidate, seconds, other))
    return tuple(found)


def training_seconds(record: TrialRecord, tokens: int) -> float | None:
    """Start, first update and `tokens` at the measured rate; None where the record does not tell."""
    if not record.targets_per_second or record.seconds.start is None or record.seconds.compile is None:
        return None
    return record.seconds.start + record.seconds.compile + tokens / record.targets_per_second


def factors(searched: Sequence[TrialRecord]) -> tuple[Factor, ...]:
    """The settings in which the records differ, with each value's figures, in the order the study came to them."""
    names = dict.fromkeys(name for record in searched for name in record.execution)
    found = []
    for name in names:
        values: dict[str, list[TrialRecord]] = {}
        for record in searched:
            values.setdefault(value_text(record.execution.get(name)), []).append(record)
        if len(values) > 1:
            found.append(Factor(name, tuple(_value(text, own) for text, own in values.items())))
    return tuple(found)


def _value(text: str, records: Sequence[TrialRecord]) -> tuple[str, tuple[Point, ...], str]:
    points = [Point(one.candidate, one.targets_per_second or 0.0) for one in records if believed(one)]
    fates = dict.fromkeys(one.fate.value.replace("_", " ") for one in records if not believed(one))
    return text, tuple(sorted(points, key=lambda point: -point.targets_per_second)), ", ".join(fates)


def value_text(value: object) -> str:
    """A setting's value as YAML shows it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def believed(record: TrialRecord) -> bool:
    """Whether the record has a throughput that counts."""
    return record.fate == Fate.COMPLETE and bool(record.targets_per_second)


def kernel_times(baseline: TrialRecord | None, selected: TrialRecord | None) -> tuple[Pair, ...]:
    """Milliseconds an update by category, the longest first."""
    both = [_by_category(record) for record in (baseline, selected)]
    names = {name for one in both if one for name in one}
    pairs = [Pair(name, *(None if one is None else one.get(name, 0.0) for one in both)) for name in names]
    return tuple(sorted(pairs, key=lambda pair: (-max(pair.baseline or 0, pair.selected or 0), pair.name)))


def _by_category(record: TrialRecord | None) -> dict[str, float] | None:
    if record is None or record.kernels is None:
        return None
    sums: dict[str, float] = {}
    for kernel in record.kernels:
        sums[kernel.category] = sums.get(kernel.category, 0.0) + kernel.milliseconds
    return sums


def memory_bytes(record: TrialRecord) -> int | None:
    """What the candidate took at most: by the driver, else by the allocator."""
    memory = record.memory
    known = [value for value in (memory.used_bytes, memory.peak_reserved_bytes, memory.peak_allocated_bytes) if value]
    return max(known, default=None)


def levelled(
    records: Sequence[TrialRecord], searched: Sequence[TrialRecord], baseline: TrialRecord | None
) -> list[TrialRecord]:
    """The search's records as on one device, as far as the controls among all `records` tell."""
    controls = Controls(baseline.execution_identity if baseline else "")
    for record in records:
        if record.purpose != "verification":
            controls.hear(record)
    return controls.levelled(searched)


def device_speeds(records: Sequence[TrialRecord]) -> tuple[DeviceSpeed, ...]:
    """The devices as their controls and the baseline's own record show them; none where no control was measured."""
    names = {one.execution_identity for one in records if one.purpose == "control"}
    measured = [
        one for one in records if one.execution_identity in names and one.purpose != "verification" and believed(one)
    ]
    controls = [
        Control(device_label(one.devices[0] if one.devices else None), one.timestamp, one.targets_per_second or 0.0)
        for one in measured
    ]
    return tuple(DeviceBlocks(controls, spread_of(measured)).speeds()) if controls else ()
