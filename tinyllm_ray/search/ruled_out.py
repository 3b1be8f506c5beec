"""What out-of-memory of one execution says of others, and when so many failed that a study gives up."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tinyllm_ray.execution import HOST_KEYS
from tinyllm_ray.records import Fate, TrialRecord

SAVES_MEMORY = {
    "recompute_activations": (False, True),
    "loss_kernel": ("torch", "triton"),
    "residual_dtype": ("float32", "bfloat16"),
}
"""Settings whose second value never needs more memory than the first."""

RAN = frozenset({Fate.COMPLETE, Fate.DOMINATED})
"""Fates of executions that run and compute what they should."""

HOPELESS_TRIALS = 8
"""After so many without one that ran, the study gives up: the fault is not in the settings."""


def out_of_memory(execution: Mapping[str, Any], records: Iterable[TrialRecord]) -> TrialRecord | None:
    """A record that ran out of memory with no larger micro-batch and nothing that needs more; None where there is none.

    Everything else has to be equal: kinds of update and backends need different amounts.
    """
    for record in records:
        if record.fate == Fate.OUT_OF_MEMORY and _needs_as_much(execution, record.execution):
            return record
    return None


def hopeless(records: Collection[TrialRecord]) -> bool:
    """Whether so many failed, and none ran, that trying others makes no sense."""
    return len(records) >= HOPELESS_TRIALS and not any(record.fate in RAN for record in records)


def _needs_as_much(execution: Mapping[str, Any], failed: Mapping[str, Any]) -> bool:
    for key, value in execution.items():
        other = failed.get(key, value)
        if key in HOST_KEYS or value == other:
            continue
        if key == "micro_batch_size" and value > other:
            continue
        if key in SAVES_MEMORY and SAVES_MEMORY[key] == (value, other):
            continue
        return False
    return True
