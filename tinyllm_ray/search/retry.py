"""Which of a study's failed candidates are measured again when it goes on."""

from collections.abc import Collection, Iterable

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord

RETRIABLE = (Fate.FAILED, Fate.INVALID, Fate.OUT_OF_MEMORY, Fate.TIMED_OUT, Fate.LOST)


def fates_to_retry(words: Iterable[str], resume: bool) -> frozenset[Fate]:
    """The fates that `--retry` names. Raises ConfigError for others, and for a study that does not go on."""
    words = list(words)
    if words and not resume:
        raise ConfigError("--retry: there is nothing to measure again in a study that begins; add --resume")
    for word in words:
        if word not in RETRIABLE:
            raise ConfigError(f"--retry: {word!r} is not a fate to measure again; give some of {','.join(RETRIABLE)}")
    return frozenset(Fate(word) for word in words)


def retried(records: Iterable[TrialRecord], fates: Collection[Fate]) -> list[TrialRecord]:
    """The records for a study to go on with: the search's trials with one of these `fates` count as lost.

    A lost trial says nothing about its candidate, so that it may be measured again, and speaks against no setting.
    """
    return [
        one.model_copy(update={"fate": Fate.LOST}) if one.purpose == "search" and one.fate in fates else one
        for one in records
    ]
