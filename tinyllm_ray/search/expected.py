"""What throughput a training with a measured execution may expect, and how far one process may lie from that.

The interval is one for a further process, not for the execution's mean: processes differ by more than any number of
windows of one says. With n processes of log throughput spread s, and windows that leave an error e of each,

    variance = s^2 (1 + 1/n) + e^2 / n

and the quantile is Student's, with the degrees of freedom that the spread is known by (Gelman et al., Bayesian Data
Analysis, 3.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tinyllm_ray.measure.bounds import window_error
from tinyllm_ray.measure.student import t_quantile
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.finalists import SUSTAINED_SECONDS
from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.rates import rate

CONFIDENCE = 0.90


@dataclass(frozen=True)
class ExpectedRate:
    """Targets a second."""

    rate: float
    low: float
    high: float
    """Where a further process lies, with 90%."""
    processes: int
    """That `rate` comes from."""
    verified: bool
    """Whether they were measured after the execution was chosen."""


def expected_rate(chosen: TrialRecord, repeats: Sequence[TrialRecord], spread: Spread) -> ExpectedRate:
    """From the search's record of an execution and verification's records of it, any fates among them.

    A minute's load is what a training is, so where there is such a record the others, shorter and on a cooler device,
    do not count; without repeats there is only the search's figure, which being the best one flatters. `chosen` has to
    have a throughput.
    """
    complete = [record for record in repeats if record.fate == Fate.COMPLETE and rate(record) is not None]
    loaded = [record for record in complete if record.protocol and record.protocol.least_seconds >= SUSTAINED_SECONDS]
    used = loaded or complete or [chosen]
    rates = [found for record in used if (found := rate(record)) is not None]
    assert rates, chosen.candidate
    # A record without windows has nothing to show an error by.
    errors = [window_error([w.targets_per_second for w in record.windows]) for record in used if record.windows]
    count = len(rates)
    error = math.sqrt(spread.value**2 * (1 + 1 / count) + fmean([each**2 for each in errors] or [0.0]) / count)
    margin = t_quantile((1 + CONFIDENCE) / 2, spread.degrees + count - 1) * error
    middle = math.exp(fmean(math.log(found) for found in rates))
    return ExpectedRate(middle, middle * math.exp(-margin), middle * math.exp(margin), count, bool(complete))
