"""What a study is after: the seconds that all planned trainings take, or plain throughput."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.cost import Starts
from tinyllm_ray.search.rates import rate

MANY_TOKENS = (10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000)
"""For which the report names the winners."""

ObjectiveKind = Literal["training", "throughput"]

StartsOf = Callable[[Mapping[str, Any]], Starts]
"""Like `CostModel.starts`."""


@dataclass(frozen=True)
class Objective:
    """Seconds of `runs` trainings of `tokens` targets, or (throughput) of one without end."""

    kind: ObjectiveKind = "throughput"
    tokens: float = 0.0
    """Targets of one training: the recipe's `Config.token_budget`. Meaningless where throughput is asked for."""
    runs: int = 1
    evaluation_seconds: float = 0.0
    """Of one training, alike for all candidates."""

    def __post_init__(self) -> None:
        assert self.kind == "throughput" or (self.tokens > 0 and self.runs >= 1), self

    @property
    def targets(self) -> float:
        """Of all planned trainings."""
        return self.tokens * self.runs

    @property
    def gain_in_words(self) -> str:
        """What a candidate has to be expected to do to be measured, after `to`."""
        return "be faster" if self.kind == "throughput" else "save more than it takes to measure"

    def fixed_seconds(self, starts: Starts) -> float:
        """What all trainings spend beside their updates: compilation cold once, then starts that find it cached."""
        each = starts.start + starts.warm + self.evaluation_seconds
        return starts.cold - starts.warm + self.runs * each

    def seconds(self, starts: Starts, targets_per_second: float) -> float:
        """What all trainings take. Only where the kind is training."""
        return self.fixed_seconds(starts) + self.targets / targets_per_second

    def value(self, starts: Starts, targets_per_second: float) -> float:
        """Less is better: seconds, or where throughput is asked for minus targets a second."""
        return -targets_per_second if self.kind == "throughput" else self.seconds(starts, targets_per_second)

    def noise(self, targets_per_second: float, share: float) -> float:
        """By how much `value` is uncertain where the throughput is by `share`."""
        return share * (targets_per_second if self.kind == "throughput" else self.targets / targets_per_second)


class Winner(NamedTuple):
    """The record that trains so many targets soonest."""

    tokens: int
    record: TrialRecord
    seconds: float
    """Of all runs."""
    baseline_seconds: float | None = None
    """The baseline's; None where it is not complete."""


def winners(
    records: Iterable[TrialRecord],
    starts: StartsOf,
    runs: int = 1,
    tokens: Iterable[int] = MANY_TOKENS,
    baseline: str | None = None,
) -> list[Winner]:
    """For each number of targets the complete record whose trainings take least; empty where none is complete.

    `baseline` is the execution identity of what they are shown beside.
    """
    complete = [record for record in records if record.fate == Fate.COMPLETE and rate(record) is not None]
    found = []
    for count in tokens if complete else ():
        objective = Objective("training", count, runs)
        takes = [objective.seconds(starts(record.execution), rate(record) or 0.0) for record in complete]
        least = min(range(len(complete)), key=takes.__getitem__)
        own = next((index for index, one in enumerate(complete) if one.execution_identity == baseline), None)
        found.append(Winner(count, complete[least], takes[least], None if own is None else takes[own]))
    return found
