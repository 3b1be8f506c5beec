"""What the results of some executions say of others: too large, the same by another name, or hopeless."""

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


def named_by_auto(records: Iterable[TrialRecord]) -> str | None:
    """The one attention backend that `auto` has run as by its device kernels; None where it was several, or is unknown.

    PyTorch chooses by device, dtype and shape, which all candidates of a study share.
    """
    seen: set[str] = set()
    for record in records:
        proof = record.proof if record.fate in RAN else None
        if proof is not None and proof.kernel_source == "device" and record.execution["sdpa_backend"] == "auto":
            seen.update(proof.attention_seen)
    return seen.pop() if len(seen) == 1 else None


class RuledOut:
    """Whether an execution need not be measured: it cannot fit in memory, or it is another by name."""

    def __init__(self, records: Iterable[TrialRecord], backends: Collection[str]) -> None:
        """`records` are the search's results; `backends` the values of `sdpa_backend` that it may take."""
        records = list(records)
        self._failed = [record for record in records if record.fate == Fate.OUT_OF_MEMORY]
        self._same_as_auto = named_by_auto(records) if "auto" in backends else None

    def __call__(self, execution: Mapping[str, Any]) -> bool:
        return execution["sdpa_backend"] == self._same_as_auto or out_of_memory(execution, self._failed) is not None


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
