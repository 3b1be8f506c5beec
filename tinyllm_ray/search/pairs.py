"""Whether one execution is faster than another, from pairs of fresh processes measured side by side.

The pairs' log ratios are taken as normal about the log of the true ratio, with one variance. A few pairs alone say
little about it, so it is moderated by what is known of processes and of these processes' windows,

    s^2 = (v0 s0^2 + (n - 1) s_pairs^2) / (v0 + n - 1),    s0^2 = 2 (process spread^2 + mean window error^2)

and the mean has Student's t distribution with v0 + n - 1 degrees of freedom (the posterior under a flat prior for the
mean and a scaled inverse chi-square one for the variance: Gelman et al., Bayesian Data Analysis, 3.2; Smyth 2004,
doi:10.2202/1544-6115.1027). With three pairs and nothing known, the 90% interval would be 2.9 standard errors wide to
either side; with four degrees of freedom known it is 1.9.

A study looks after every pair from the third to the eighth, so each look decides at 1%: together they call equals
different in fewer than 5% of studies (`tests/benchmarks/verification_power.py` has the figures).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tinyllm_ray.measure.student import t_quantile
from tinyllm_ray.search.noise import Spread

LEAST_PAIRS = 3
MOST_PAIRS = 8

CAUTIOUS_SPREAD = Spread(value=0.0035, degrees=4)
"""What is assumed of a device without repeats of its own: 1.4 times the pooled spread of `measure.bounds`, as a
verdict is to hold on machines noisier than most; of ten recorded groups one lay above it (0.49%)."""

CONFIDENCE = 0.90
"""Of the interval that is reported."""
LOOK_LEVEL = 0.01
"""Two-sided, of each look at whether two differ."""
TIE_MARGIN = 0.006
"""Where the reported interval lies within this of equal, a difference would not be worth looking for."""

UNSTEADY_SHARE = 0.06
"""Processes of one execution further apart say that something else is at work: on a GPU that nobody else uses they lie
within 1.5% of each other, on two idle CPU cores usually within 6%, and where other machines of an H200's host took its
cores a compiled baseline that launches its kernels one by one came out 2 to 17% too slow."""

Outcome = Literal["faster", "slower", "tie", "open"]


@dataclass(frozen=True)
class Side:
    """One process of a pair."""

    targets_per_second: float
    window_error: float
    """Standard error of its log that its windows show."""

    def planned(self, lag: float) -> "Side":
        """As over all planned trainings, whose starts take `lag` seconds a target."""
        slowed = planned_rate(self.targets_per_second, lag)
        return replace(
            self, targets_per_second=slowed, window_error=self.window_error * slowed / self.targets_per_second
        )


@dataclass(frozen=True)
class Pair:
    """Two processes measured one after the other on one device."""

    candidate: Side
    other: Side
    sustained: bool = False
    """Whether both were measured under a minute's load."""

    @property
    def log_ratio(self) -> float:
        return math.log(self.candidate.targets_per_second / self.other.targets_per_second)

    def planned(self, lag: float, other_lag: float) -> "Pair":
        """As over all planned trainings, whose starts take so many seconds a target of each of the two."""
        return replace(self, candidate=self.candidate.planned(lag), other=self.other.planned(other_lag))


@dataclass(frozen=True)
class Verdict:
    """What pairs say of a candidate beside another execution."""

    ratio: float
    """Geometric mean of the pairs' ratios: how many times the other's throughput the candidate has."""
    low: float
    high: float
    """The ratio's 90% interval."""
    pairs: int
    outcome: Outcome
    """faster, slower: shown. tie: shown to be within 0.6%. open: neither, and more pairs might tell; a tie, too, where
    there are no more."""

    @property
    def decided(self) -> bool:
        return self.outcome != "open"

    @property
    def differs(self) -> bool:
        return self.outcome in ("faster", "slower")


def planned_rate(targets_per_second: float, lag: float) -> float:
    """Targets a second over all planned trainings, whose starts take `lag` seconds a target."""
    return targets_per_second / (1 + lag * targets_per_second)


def judge(pairs: Sequence[Pair], spread: Spread = CAUTIOUS_SPREAD, comparisons: int = 1) -> Verdict:
    """The verdict from one pair or more; with fewer than three it stays open.

    `comparisons` is how many such verdicts a study draws: each decides at its share of the level (Bonferroni), so that
    several equal finalists are not called different more often than one. Raises ValueError without a pair.
    """
    if not pairs:
        raise ValueError("no pair, no verdict")
    mean, error, degrees = _mean(pairs, spread)
    interval = t_quantile((1 + CONFIDENCE) / 2, degrees) * error
    if len(pairs) < LEAST_PAIRS:
        outcome: Outcome = "open"
    elif abs(mean) > t_quantile(1 - LOOK_LEVEL / comparisons / 2, degrees) * error:
        outcome = "faster" if mean > 0 else "slower"
    else:
        outcome = "tie" if abs(mean) + interval <= TIE_MARGIN else "open"
    return Verdict(math.exp(mean), math.exp(mean - interval), math.exp(mean + interval), len(pairs), outcome)


def unsteady(pairs: Sequence[Pair], candidate: str) -> str:
    """In words, to add to a verdict on `candidate` and the baseline, by how much processes of one of them differ among
    themselves; empty where that is usual."""
    rates = {
        candidate: [pair.candidate.targets_per_second for pair in pairs],
        "the baseline": [pair.other.targets_per_second for pair in pairs],
    }
    apart = {name: max(found) / min(found) - 1 for name, found in rates.items() if found}
    name = max(apart, key=lambda name: apart[name], default=candidate)
    if apart.get(name, 0.0) <= UNSTEADY_SHARE:
        return ""
    return f"; processes of {name} differ by {100 * apart[name]:.0f}%, as where something else uses the machine"


def disagrees(pair: Pair, others: Sequence[Pair], spread: Spread = CAUTIOUS_SPREAD) -> bool:
    """Whether `pair` lies outside of where `others` expect a further one (99%), as where only load slows one side."""
    if not others:
        return False
    mean, error, degrees = _mean(others, spread)
    single = error * math.sqrt(1 + len(others))
    return abs(pair.log_ratio - mean) > t_quantile(0.995, degrees) * single


def expected_gain(pairs: Sequence[Pair], spread: Spread = CAUTIOUS_SPREAD) -> float:
    """Log throughput to be gained by taking the pairs' candidate instead of the other wherever it is the faster one.

    That is E[max(0, log ratio)] = s (phi(z) + z Phi(z)), z = mean / s, in the normal approximation (Raiffa and
    Schlaifer, Applied Statistical Decision Theory, 5.3). Raises ValueError without a pair.
    """
    if not pairs:
        raise ValueError("no pair, nothing is known")
    mean, error, _ = _mean(pairs, spread)
    z, normal = mean / error, statistics.NormalDist()
    return error * (normal.pdf(z) + z * normal.cdf(z))


def _mean(pairs: Sequence[Pair], spread: Spread) -> tuple[float, float, float]:
    """Mean log ratio, its standard error, and the degrees of freedom of that."""
    ratios = [pair.log_ratio for pair in pairs]
    errors = [side.window_error**2 for pair in pairs for side in (pair.candidate, pair.other)]
    known = 2 * (spread.value**2 + statistics.fmean(errors))
    own = statistics.variance(ratios) if len(ratios) > 1 else 0.0
    degrees = spread.degrees + len(ratios) - 1
    variance = (spread.degrees * known + (len(ratios) - 1) * own) / degrees
    return statistics.fmean(ratios), math.sqrt(variance / len(ratios)), degrees
