"""What a study's page says, drawn from its records and its summary alone: no file, no clock, no HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.records import KernelTime, TrialRecord
from tinyllm_ray.search.device_blocks import DeviceSpeed
from tinyllm_ray.search.finalists import SUSTAINED_SECONDS
from tinyllm_ray.tune.page import findings
from tinyllm_ray.tune.page.findings import Factor, Pair, Payback, Point, Speedup, Winner
from tinyllm_ray.tune.page.spending import Spending, spending


@dataclass(frozen=True)
class Candidate:
    """One candidate in the table."""

    name: str
    label: str
    fate: str
    """A fate, or `running`, `pending`, `skipped`, `not started`, `interrupted`."""
    reason: str
    role: str
    """selected, baseline, eager, several of them, or nothing."""
    targets_per_second: float | None
    versus_baseline: float | None
    spread: float | None
    """Half the windows' range over their median."""
    seconds: float | None
    evidence: tuple[tuple[str, str], ...]
    """What supports the figure and the fate, as name and text."""
    configuration: str | None


@dataclass(frozen=True)
class StudyPage:
    """Everything the page shows."""

    title: str
    ended: str | None
    """Why the study is over; None while it goes on, or where it was killed."""
    verdict: str | None
    selected: Candidate | None
    speedup: Speedup | None
    payback: Payback
    spending: Spending
    factors: tuple[Factor, ...]
    kernel_times: tuple[Pair, ...]
    kernels: tuple[KernelTime, ...]
    """The selected execution's, the longest first."""
    memory: tuple[tuple[Point, int], ...]
    """Candidates with their peak bytes."""
    memory_total: int | None
    devices: tuple[DeviceSpeed, ...]
    device_names: tuple[str, ...]
    winners: tuple[Winner, ...]
    runs: int
    """Trainings of so many tokens that the winners' seconds are of."""
    candidates: tuple[Candidate, ...]
    rounds: tuple[tuple[int, tuple[Point, ...]], ...]
    """Of the verification: its rounds with the throughput of each process."""
    under_load: frozenset[int]
    """Rounds of a minute's sustained load."""
    environment: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    labels: Mapping[str, str]
    """By candidate."""
    roles: Mapping[str, str]
    """The candidate that is eager, baseline, selected."""


def page_data(records: Sequence[TrialRecord], summary: Mapping[str, Any]) -> StudyPage:
    """What there is to show of `records` (oldest first) and `summary`, which may be empty, or lag behind."""
    searched = [record for record in _latest(records) if record.purpose == "search" and record.kind == "measurement"]
    by_name = {record.candidate: record for record in searched}
    roles = _roles(summary, searched)
    baseline, selected = (by_name.get(roles.get(role, "")) for role in ("baseline", "selected"))
    rows = {row["candidate"]: row for row in summary.get("candidates") or ()}
    labels = {name: str(row["label"]) for name, row in rows.items()}
    candidates = [_candidate(name, rows.get(name), by_name.get(name), roles, baseline) for name in rows | by_name]
    complete = [record for record in searched if findings.believed(record)]
    level = findings.levelled(records, searched, baseline)
    speedup = findings.speedup(records, baseline, selected, summary)
    spent, told = spending(records, summary), findings.told_winners(summary)
    devices = int(summary.get("gpus") or summary.get("nodes") or max(1, len(spent.sums)))
    points = [(Point(one.candidate, one.targets_per_second or 0.0), findings.memory_bytes(one)) for one in complete]
    environment = next((record.environment for record in reversed(records) if record.environment), {})
    return StudyPage(
        title=_title(summary),
        ended=summary.get("ended"),
        verdict=summary.get("verdict"),
        selected=next((one for one in candidates if selected and one.name == selected.candidate), None),
        speedup=speedup,
        payback=findings.payback(
            spent.elapsed_seconds, devices, baseline, selected, speedup.shown if speedup else None
        ),
        spending=spent,
        factors=findings.factors(level),
        kernel_times=findings.kernel_times(baseline, selected),
        kernels=tuple((selected.kernels or ()) if selected else ()),
        memory=tuple((point, size) for point, size in points if size),
        memory_total=max((one.memory.total_bytes for one in records if one.memory.total_bytes), default=None),
        devices=findings.device_speeds(records),
        device_names=tuple(spent.sums),
        winners=told or findings.winners([one for one in level if findings.believed(one)], baseline),
        runs=int((summary.get("objective") or {}).get("runs") or 1) if told else 1,
        candidates=tuple(candidates),
        rounds=_rounds(records, by_name),
        under_load=frozenset(
            one.round
            for one in records
            if one.round is not None and one.protocol and one.protocol.least_seconds >= SUSTAINED_SECONDS
        ),
        environment=flat(environment),
        facts=_facts(summary, records),
        labels={name: labels.get(name, name) for name in rows | by_name},
        roles={"selected": "", "baseline": ""} | roles,
    )


def _latest(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """One record a candidate: the last, which counts after a resumption."""
    return list({record.candidate: record for record in records}.values())


def _roles(summary: Mapping[str, Any], searched: Sequence[TrialRecord]) -> dict[str, str]:
    """The candidates with a role; a study without a summary is known to begin with its baseline."""
    if not summary:
        return {"baseline": searched[0].candidate} if searched else {}
    told = [(role, summary.get(role)) for role in ("selected", "baseline", "eager")]
    return {role: str(figures["candidate"]) for role, figures in told if figures}


def _candidate(
    name: str,
    row: Mapping[str, Any] | None,
    record: TrialRecord | None,
    roles: Mapping[str, str],
    baseline: TrialRecord | None,
) -> Candidate:
    rate = record.targets_per_second if record else (row or {}).get("targets_per_second")
    base = baseline.targets_per_second if baseline else None
    return Candidate(
        name=name,
        label=str(row["label"]) if row else name,
        fate=record.fate.value if record else str((row or {}).get("state")),
        reason=(record.reason if record else (row or {}).get("detail")) or "",
        role=", ".join(role for role, own in roles.items() if own == name),
        targets_per_second=rate,
        versus_baseline=(row or {}).get("versus_baseline") or (rate / base if rate and base else None),
        spread=record.spread if record else None,
        seconds=record.seconds.total if record else (row or {}).get("seconds"),
        evidence=tuple(_evidence(record)) if record else (),
        configuration=record.configuration if record else None,
    )


def _evidence(record: TrialRecord) -> list[tuple[str, str]]:
    """What is known of how the candidate ran."""
    found = [("windows", ", ".join(f"{window.targets_per_second:,.0f}" for window in record.windows))]
    proof = record.proof
    if proof:
        seen = " and ".join(proof.attention_seen) or "none seen"
        found.append(("attention", f"{seen} (asked for: {proof.attention_asked or 'nothing'})"))
        if proof.kernel_source:
            found.append(("kernels from", f"{proof.kernel_source}, {proof.profiled_updates} updates"))
        if proof.parity:
            loss, gradient = proof.parity.relative_loss_error, proof.parity.relative_gradient_error
            found.append(("parity with float32", f"loss {_error(loss)}, gradients {_error(gradient)}"))
        points = [f"{point.loss:.4f} at {point.update}" for point in proof.trajectory if point.loss is not None]
        found.append(("loss at update", ", ".join(points)))
    found += _sensors(record)
    if record.first_update_seconds is not None:
        found.append(("first update", f"{record.first_update_seconds:.2f} s"))
    memory = findings.memory_bytes(record)
    found.append(("memory", f"{memory / 2**30:.2f} GiB" if memory else ""))
    return [(name, text) for name, text in found if text]


def _sensors(record: TrialRecord) -> list[tuple[str, str]]:
    """What the device told at the windows' ends: as least and most where windows differ."""
    states = [window.gpu for window in record.windows if window.gpu]
    found = []
    for name, field, unit in _SENSORS:
        values = [value for state in states if (value := getattr(state, field)) is not None]
        if values:
            ends = dict.fromkeys(f"{end:,.0f}" for end in (min(values), max(values)))
            found.append((name, f"{' to '.join(ends)} {unit}"))
    if record.throttled_windows is not None:
        throttled = ", ".join(str(index + 1) for index in record.throttled_windows)
        found.append(("windows with held clocks", throttled or "none"))
    reasons = dict.fromkeys(reason for state in states if state.throttled for reason in state.throttle_reasons or ())
    if reasons:
        found.append(("clocks held by", ", ".join(reasons).replace("_", " ")))
    if record.targets_per_joule is not None:
        found.append(("energy", f"{record.targets_per_joule:,.0f} targets a joule"))
    return found


_SENSORS = (
    ("clock", "sm_clock_mhz", "MHz"),
    ("memory clock", "memory_clock_mhz", "MHz"),
    ("power", "power_watts", "W"),
    ("temperature", "temperature_celsius", "°C"),
)
"""Of `GpuState`, with the words and units for people."""


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _rounds(
    records: Sequence[TrialRecord], by_name: Mapping[str, TrialRecord]
) -> tuple[tuple[int, tuple[Point, ...]], ...]:
    names = {record.execution_identity: name for name, record in by_name.items()}
    rounds: dict[int, list[Point]] = {}
    for record in records:
        if record.purpose == "verification" and record.round is not None and findings.believed(record):
            point = Point(names.get(record.execution_identity, record.candidate), record.targets_per_second or 0.0)
            rounds.setdefault(record.round, []).append(point)
    return tuple((number, tuple(points)) for number, points in sorted(rounds.items()))


def _title(summary: Mapping[str, Any]) -> str:
    parameters, targets = summary.get("parameters"), summary.get("targets_per_update")
    if not parameters or not targets:
        return "a study"
    return f"{parameters / 1e6:.1f}M parameters, {targets:,} targets an update"


def _facts(summary: Mapping[str, Any], records: Sequence[TrialRecord]) -> tuple[tuple[str, str], ...]:
    record = records[-1] if records else None
    shown = ("study", "space", "space_notes", "protocol", "search_windows", "recipe_identity", "cache_identity")
    found = {name: summary[name] for name in (*shown, "nodes", "gpus") if summary.get(name) not in (None, [], "")}
    if record:
        found |= {"source_identity": record.source_identity, "source_dirty": record.source_dirty}
    return flat(found)


def flat(values: Mapping[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested values as dotted names and texts; what is empty is left out."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            found += flat({str(index): one for index, one in enumerate(value)}, f"{prefix}{name}.")
        elif value not in (None, "", []):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((f"{prefix}{name}", text))
    return tuple(found)
