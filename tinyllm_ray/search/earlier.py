"""Studies of other model sizes on the same machines: what a study of the next size begins with, and how far it counts.

All sizes' figures are functions of the execution that are alike, so what one study measured says something of the
next, the less the further their sizes are apart: the covariance of two studies' figures is that of one study's times a
number for the pair (the intrinsic model of Bonilla, Chai & Williams, Multi-task Gaussian Process Prediction, 2007; for
choosing what to measure, Swersky, Snoek & Adams, Multi-Task Bayesian Optimization, 2013). What was measured well counts
for much and what was not for nothing, interactions included. A study's own records soon outweigh it, and where they
contradict, the number that they make most likely is a smaller one (ML-II, Rasmussen & Williams 2006, 5.4.1).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.first_updates import FirstUpdate, first_updates
from tinyllm_ray.search.rates import rate

ANOTHER_RECIPE: Final[Mapping[float, float]] = {0.9: 0.7, 0.6: 0.2, 0.3: 0.1}
"""Correlation of what a setting does to two recipes of one size (they may differ in context or tokens an update), and
how likely it is before a study's own records speak."""

APART = 6.5
"""Of the logarithms of two sizes' parameters, where the correlation falls to 1/e of that: 0.90 for twice as many."""


class Origin(NamedTuple):
    """Whose figure one is."""

    study: int
    """0 is the study itself, others are earlier ones."""
    size: float
    """Logarithm of the model's parameters over those of the study itself."""


OWN = Origin(0, 0.0)


def alike(ones: Sequence[Origin], others: Sequence[Origin], another: float) -> NDArray[np.float64]:
    """Correlation of figures of the two, [ones, others]; `another` is that of two recipes of one size."""
    same = np.equal.outer([one.study for one in ones], [other.study for other in others])
    apart = np.abs(np.subtract.outer([one.size for one in ones], [other.size for other in others]))
    result: NDArray[np.float64] = np.where(same, 1.0, another * np.exp(-apart / APART))
    return result


@dataclass(frozen=True, eq=False)
class EarlierStudy:
    """What a study of another size measured."""

    parameters: int
    targets_per_update: int
    records: tuple[TrialRecord, ...]
    """Those of its search, oldest first."""

    @classmethod
    def of(cls, parameters: int, targets_per_update: int, records: Sequence[TrialRecord]) -> "EarlierStudy":
        """Of all its records: a verification's windows are as long as the verdict asked for, so they stay out."""
        searched = tuple(record for record in records if record.purpose == "search")
        return cls(parameters, targets_per_update, searched)

    @functools.cached_property
    def first_updates(self) -> list[FirstUpdate]:
        return first_updates(self.records)

    @property
    def verdicts(self) -> list[TrialRecord]:
        """Records whose fate says something of their settings at another size: not those that ran out of time."""
        return [record for record in self.records if record.fate not in {Fate.TIMED_OUT, Fate.LOST}]

    def work_per_second(self, eager: bool) -> float | None:
        """Parameters times targets a second of its fastest execution of a kind; None where it measured none."""
        ran = [record for record in self.records if (record.execution["update"] == "eager") == eager]
        rates = [value for record in ran if (value := rate(record)) is not None]
        return self.parameters * max(rates) if rates else None
