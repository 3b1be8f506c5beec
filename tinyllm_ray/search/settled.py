"""Which records settle a candidate, and which say nothing about it, so that it is measured again."""

from collections.abc import Iterable

from tinyllm_ray.records import Fate, TrialRecord

MEASURED_AGAIN = frozenset({Fate.TIMED_OUT, Fate.LOST})
"""Fates that say nothing about a candidate once the study is resumed: with more time, on a sound node, it may do."""

_LOSSES = 2
"""After so many the candidate itself may be what takes its node down."""


def keep(record: TrialRecord, settled: bool, results: dict[str, TrialRecord], lapsed: dict[str, TrialRecord]) -> None:
    """Put a candidate's last record among the `results`, or the `lapsed` ones, by execution identity.

    It takes the place of any before: what failed, was tried once more and was cut then is settled no more.
    """
    kept, other = (results, lapsed) if settled else (lapsed, results)
    other.pop(record.execution_identity, None)
    kept[record.execution_identity] = record


def settles(record: TrialRecord, records: Iterable[TrialRecord]) -> bool:
    """Whether a candidate is done with after this record, the last of `records`, in the run that made it.

    One whose node or Ray process went away is measured again, on what is left of the cluster.
    """
    if record.fate != Fate.LOST:
        return True
    name = record.execution_identity
    return sum(known.fate == Fate.LOST and known.execution_identity == name for known in records) >= _LOSSES
