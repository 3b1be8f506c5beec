"""A candidate: one execution of a study, with the names people and files know it by."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.execution import ExecutionConfig

_SHORT = {"micro_batch_size": "mb{}", "update": "{}", "compile_mode": "{}", "sdpa_backend": "{}", "cpu_threads": "t{}"}
"""How settings are written that every candidate shows; others appear where they differ from their default."""
_KERNEL = "_kernel"
"""Settings that end so are named together: triton for all of Triton's, triton:loss+norm for some."""
_BFLOAT16_STREAM = ("residual_dtype", "bfloat16")


@dataclass(frozen=True)
class Candidate:
    """One execution, all defaults settled."""

    id: str
    """Fit for a file name and stable over a resume, like c01-mb32-compiled-default-auto-t8."""
    label: str
    """For people, like mb32 compiled default auto t8, or mb32 graph default flash4 t8 triton bf16."""
    execution: dict[str, Any]
    execution_identity: str


def make_candidate(number: int, execution: Mapping[str, Any]) -> Candidate:
    """The candidate of a settled execution; `number` makes its id unique within the study."""
    words = _words(execution)
    return Candidate(
        id="-".join([f"c{number:02d}", *(re.sub(r"[^A-Za-z0-9._-]+", "-", word) for word in words)]),
        label=" ".join(words),
        execution=dict(execution),
        execution_identity=identity(execution),
    )


class Candidates:
    """The candidates of a study, numbered in the order they were asked for; recorded ones keep their ids."""

    def __init__(self) -> None:
        self._known: dict[str, Candidate] = {}

    def __getitem__(self, execution_identity: str) -> Candidate:
        return self._known[execution_identity]

    def __contains__(self, execution_identity: object) -> bool:
        return execution_identity in self._known

    def in_order(self) -> list[Candidate]:
        """By their numbers."""
        return sorted(self._known.values(), key=lambda candidate: candidate_number(candidate.id) or 0)

    def register(self, execution: Mapping[str, Any]) -> Candidate:
        """The candidate of a settled execution, with the first free number where it is a stranger."""
        name = identity(execution)
        if name not in self._known:
            self._known[name] = make_candidate(self.free_number(), execution)
        return self._known[name]

    def keep(self, candidate_id: str, execution: Mapping[str, Any], execution_identity: str) -> None:
        """Take over a recorded candidate under the names it was recorded with, unless it is known already."""
        if execution_identity not in self._known:
            made = make_candidate(candidate_number(candidate_id) or 0, execution)
            self._known[execution_identity] = replace(made, id=candidate_id, execution_identity=execution_identity)

    def free_number(self) -> int:
        """The smallest number that no candidate has."""
        taken = {candidate_number(candidate.id) for candidate in self._known.values()}
        return next(number for number in itertools.count(1) if number not in taken)


def candidate_number(candidate_id: str) -> int | None:
    """The running number in a candidate's id; None where the id is not one of ours."""
    match = re.match(r"c(\d+)-", candidate_id)
    return int(match[1]) if match else None


def _words(execution: Mapping[str, Any]) -> list[str]:
    words = [form.format(execution[key]) for key, form in _SHORT.items() if execution[key] is not None]
    kernels = [key for key in execution if key.endswith(_KERNEL)]
    ours = [key.removesuffix(_KERNEL) for key in kernels if execution[key] == "triton"]
    if ours:
        words.append("triton" if len(ours) == len(kernels) else f"triton:{'+'.join(ours)}")
    for key, value in execution.items():
        if key not in _SHORT and key not in kernels and value != ExecutionConfig.model_fields[key].default:
            words.append("bf16" if (key, value) == _BFLOAT16_STREAM else f"{key}={value}")
    return words
