"""What a verification came to: which execution is used, by how much it is faster, and what ties with it.

Which is used goes by what the study is after: where that is the seconds of the planned trainings, an execution that is
faster by less than its starts take longer is not. By how much it is faster is a matter of throughput alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.pairs import LEAST_PAIRS, Pair, Verdict, disagrees, judge, unsteady
from tinyllm_ray.search.verdict import FULL, break_tie, fills_memory


@dataclass(frozen=True)
class Verified:
    """The verdict of an evidence."""

    selected: TrialRecord
    """The search's record of the execution to use."""
    speedup: Verdict | None
    """Of the selected one over the baseline; None where the baseline itself is selected."""
    verdicts: Mapping[str, Verdict]
    """Of each finalist over the baseline, by execution identity."""
    ties: tuple[TrialRecord, ...]
    """The others that cannot be told from the best, the best first."""
    open_comparisons: tuple[str, ...]
    """Execution identities in comparisons that matter and are not decided: more pairs might."""
    sustained_targets_per_second: float | None
    """Of the selected one under a minute's load: what a training may expect."""
    baseline_sustained_targets_per_second: float | None
    load_disagrees: bool
    """Whether the pair under load lies outside of what the short pairs expect."""
    reason: str
    """On one line, for people."""


@dataclass(frozen=True)
class Evidence:
    """All that a verdict is drawn from."""

    baseline: str
    members: Mapping[str, TrialRecord]
    """The search's records of the baseline and the finalists, by execution identity."""
    pairs: Callable[[str, str], list[Pair]]
    """All pairs of two executions, oldest first."""
    sustained_rate: Callable[[str], float | None]
    """Targets a second of an execution under a minute's load."""
    records: Iterable[TrialRecord]
    """The study's, which show what executions take to start."""
    comparisons: int
    """Finalists at the beginning."""
    spread: Spread
    planned: Callable[[str, str], list[Pair]] | None = None
    """The same pairs as over all planned trainings, starts included; None where throughput decides."""


def conclude(evidence: Evidence) -> Verified | None:
    """The verdict so far; None before the baseline and a finalist make three pairs, as fewer say nothing."""
    baseline = evidence.baseline
    pairs = {name: evidence.pairs(name, baseline) for name in evidence.members if name != baseline}
    pairs = {name: found for name, found in pairs.items() if len(found) >= LEAST_PAIRS}
    if not pairs:
        return None
    comparisons, spread = evidence.comparisons, evidence.spread
    verdicts = {name: judge(found, spread, comparisons) for name, found in pairs.items()}
    planned = evidence.planned or evidence.pairs
    sooner = {name: judge(planned(name, baseline), spread, comparisons) for name in pairs}
    gains = {name: verdict.ratio for name, verdict in sooner.items()} | {baseline: 1.0}
    order = sorted(gains, key=lambda name: gains[name], reverse=True)
    top = order[0]
    beside = {name: judge(found, spread, comparisons) for name in order[1:] if (found := planned(top, name))}
    tied = [name for name in order if name not in beside or beside[name].outcome != "faster"]
    # On a noisy device a tie is wide; nothing that is likely to be worse than the baseline is taken for its start.
    # A baseline that fails later on, and is no member any more, is still what the others were compared with.
    worthy = [name for name in tied if name in evidence.members and (name == baseline or sooner[name].high >= 1)]
    if not worthy:
        return None
    chosen, _, _ = break_tie([evidence.members[name] for name in worthy], evidence.records, baseline)
    selected = chosen.execution_identity
    ties = tuple(evidence.members[name] for name in tied if name in evidence.members and name != selected)
    # The pair under load does not judge itself.
    load = [pair for pair in pairs.get(selected, []) if pair.sustained][-1:]
    short = [pair for pair in pairs.get(selected, []) if not pair.sustained]
    load_disagrees = any(disagrees(pair, short, spread) for pair in load)
    shown = selected if selected in pairs else next(iter(pairs))
    speeds = {name: verdict.ratio for name, verdict in verdicts.items()} | {baseline: 1.0}
    fastest = max(speeds, key=lambda name: speeds[name])
    outrun = evidence.members.get(fastest) if fastest not in tied else None
    return Verified(
        selected=chosen,
        speedup=verdicts.get(selected),
        verdicts=verdicts,
        ties=ties,
        open_comparisons=_open(top, beside),
        sustained_targets_per_second=evidence.sustained_rate(selected),
        baseline_sustained_targets_per_second=evidence.sustained_rate(baseline),
        load_disagrees=load_disagrees,
        reason=_reason(chosen, verdicts.get(selected), ties, _under_load(load, load_disagrees), outrun)
        + unsteady(pairs[shown], evidence.members[shown].candidate),
    )


def _open(top: str, beside: Mapping[str, Verdict]) -> tuple[str, ...]:
    names = tuple(name for name, verdict in beside.items() if not verdict.decided)
    return (top, *names) if names else ()


def _under_load(load: Sequence[Pair], disagrees: bool) -> str:
    if not load:
        return ", not measured under a minute's load"
    told = f", {load[0].candidate.targets_per_second:,.0f} targets/s under a minute's load"
    return f"{told}, where the pair went otherwise ({math.exp(load[0].log_ratio):.3f}x)" if disagrees else told


def _reason(
    chosen: TrialRecord,
    speedup: Verdict | None,
    ties: Sequence[TrialRecord],
    under_load: str,
    outrun: TrialRecord | None,
) -> str:
    """`outrun` is the fastest, where its starts take longer than its speed saves."""
    if speedup is None:
        lead = f"the baseline: nothing is shown to be {'done sooner' if outrun else 'faster'}"
    else:
        lead = (
            f"{speedup.ratio:.3f}x the baseline ({speedup.low:.3f} to {speedup.high:.3f}, 90%) "
            f"in {speedup.pairs} pair{'s' * (speedup.pairs > 1)} of processes"
        )
        if not speedup.differs:
            lead += ", a difference inside the noise"
        lead += under_load
    names = [record.candidate for record in ties if fills_memory(chosen) or not fills_memory(record)]
    start = "start no sooner and need" if len(names) > 1 else "starts no sooner and needs"
    tie = f"; a tie with {', '.join(names)}, which {start} no less memory" if names else ""
    full = [record.candidate for record in ties if not fills_memory(chosen) and fills_memory(record)]
    tie += "".join(f"; a tie with {name}, which {FULL}" for name in full)
    own = f"; it {FULL}" if fills_memory(chosen) else ""
    late = f"; {outrun.candidate} takes longer for its starts than its speed saves" if outrun else ""
    return f"{chosen.candidate}: {lead}{late}{tie}{own}"
