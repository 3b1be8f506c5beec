"""How several studies share one budget: to each by what its answer is worth and what its measurements cost.

What is left to gain after n measurements falls about as 1/n, and n is a study's seconds over the seconds of one
measurement. Of the seconds for all, the sum of what is then left to gain in all studies is least where each has a share
in proportion to the root of worth times cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FAIR_MINIMUM = 0.5
"""Of an equal share, at least: what an answer is worth is a guess, and each was asked for."""

ROOM = 2.0
"""A study begins only with so many times what its baseline is expected to take: an answer needs something to compare.
One that has measured goes on where there is time for one more."""


@dataclass(frozen=True)
class Size:
    """A study that wants a share."""

    name: str
    worth: float
    """What all studies' answers are weighed by: seconds of the planned trainings, or 1 for each."""
    baseline_seconds: float
    """Expected seconds of its baseline."""
    begun: bool = False
    """Whether it has measured before."""

    @property
    def least_seconds(self) -> float:
        """With less it is not worth going on with."""
        return self.baseline_seconds * (1.0 if self.begun else ROOM)


@dataclass(frozen=True)
class Shares:
    """Who gets how much."""

    seconds: dict[str, float]
    """By name; none for those left out."""
    left_out: dict[str, str]
    """By name, why."""


def share(sizes: Sequence[Size], seconds: float) -> Shares:
    """Divide `seconds`; a study whose share is too short for it is left out, the neediest first."""
    chosen, left_out = list(sizes), dict[str, str]()
    while chosen:
        shares = _divide(chosen, seconds)
        short = [size for size in chosen if shares[size.name] < size.least_seconds]
        if not short:
            return Shares(shares, left_out)
        out = max(short, key=lambda size: size.least_seconds / max(shares[size.name], 1e-9))
        chosen.remove(out)
        left_out[out.name] = (
            f"{'one more measurement' if out.begun else 'its baseline and another'} would take about "
            f"{math.ceil(out.least_seconds)} s, and its share is {max(0, math.floor(shares[out.name]))} s"
        )
    return Shares({}, left_out)


def _divide(sizes: Sequence[Size], seconds: float) -> dict[str, float]:
    weights = [math.sqrt(size.worth * size.baseline_seconds) for size in sizes]
    least = FAIR_MINIMUM * seconds / len(sizes)
    rest = seconds - least * len(sizes)
    return {size.name: least + rest * weight / sum(weights) for size, weight in zip(sizes, weights, strict=True)}
