"""What a study spent, what its choice saves over the planned trainings, and when that pays back."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.objective import Objective, StartsOf
from tinyllm_ray.search.rates import rate


@dataclass(frozen=True)
class Account:
    """Seconds spent and saved."""

    spent_seconds: float
    """Of all trials, added up."""
    saved_seconds: float
    """By training with the selected execution instead of the baseline, over the planned runs."""
    pays_back_after_runs: int | None
    """None where it never does."""
    runs: int

    def __str__(self) -> str:
        spent = f"spent {self.spent_seconds:,.0f} s"
        runs = "the planned run" if self.runs == 1 else f"{self.runs} planned runs"
        if self.saved_seconds <= 0:
            return f"{spent} and found nothing that saves any against the baseline"
        if self.pays_back_after_runs is None:
            return f"{spent} and saves {self.saved_seconds:,.0f} s over {runs}, which more runs do not pay back"
        after = f"{self.pays_back_after_runs} run{'s' if self.pays_back_after_runs > 1 else ''}"
        return f"{spent} and saves {self.saved_seconds:,.0f} s over {runs}, paid back after {after}"


def account(
    records: Iterable[TrialRecord],
    baseline: TrialRecord,
    selected: TrialRecord,
    objective: Objective,
    starts: StartsOf,
) -> Account | None:
    """None where the objective counts no seconds or one of the two has no throughput."""
    base, best = rate(baseline), rate(selected)
    if objective.kind == "throughput" or base is None or best is None:
        return None

    def saved(runs: int) -> float:
        planned = replace(objective, runs=runs)
        return planned.seconds(starts(baseline.execution), base) - planned.seconds(starts(selected.execution), best)

    spent = sum(record.seconds.total or 0.0 for record in records)
    each = saved(2) - saved(1)
    after = max(1, math.ceil((spent - saved(1)) / each) + 1) if each > 0 else None
    return Account(spent, saved(objective.runs), after, objective.runs)
