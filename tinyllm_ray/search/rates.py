"""The throughput of a record, where it can be compared."""

import math
from collections.abc import Iterable
from statistics import stdev
from typing import Final

from tinyllm_ray.records import Fate, TrialRecord

HALF_RANGE_OF_THREE: Final = 0.846
"""Expected half range of three normal values, in standard deviations."""


def rate(record: TrialRecord) -> float | None:
    """Targets a second that can be compared; None where the trial measured none."""
    value = record.targets_per_second
    return value if value is not None and math.isfinite(value) and value > 0 else None


def ranked(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """The complete records that have a throughput, fastest first, equals in the order given."""
    complete = [record for record in records if record.fate == Fate.COMPLETE and rate(record) is not None]
    return sorted(complete, key=lambda record: rate(record) or 0.0, reverse=True)


def fastest(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """The complete record with the highest median throughput, the earlier one of two equals."""
    return next(iter(ranked(records)), None)


def noise_share(record: TrialRecord) -> float:
    """Half the range of its windows over their median; 0 where one window says nothing about noise.

    Of more than three what three would show were the figure as uncertain, since a range grows with their number.
    """
    rates = [window.targets_per_second for window in record.windows]
    if len(rates) > 3 and min(rates) > 0:
        return HALF_RANGE_OF_THREE * stdev(math.log(rate) for rate in rates) * math.sqrt(3 / len(rates))
    spread = record.spread
    return spread if spread is not None and math.isfinite(spread) else 0.0
