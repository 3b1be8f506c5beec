"""A candidate: one execution of a study, with the names people and files know it by."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.execution import ExecutionConfig

_SHORT = {"micro_batch_size": "mb{}", "update": "{}", "compile_mode": "{}", "sdpa_backend": "{}", "cpu_threads": "t{}"}
"""How settings are written that every candidate shows; others appear where they differ from their default."""


@dataclass(frozen=True)
class Candidate:
    """One execution, all defaults settled."""

    id: str
    """Fit for a file name and stable over a resume, like c01-mb32-compiled-default-auto-t8."""
    label: str
    """For people, like mb32 compiled default auto t8."""
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


def candidate_number(candidate_id: str) -> int | None:
    """The running number in a candidate's id; None where the id is not one of ours."""
    match = re.match(r"c(\d+)-", candidate_id)
    return int(match[1]) if match else None


def _words(execution: Mapping[str, Any]) -> list[str]:
    words = [form.format(execution[key]) for key, form in _SHORT.items() if execution[key] is not None]
    for key, value in execution.items():
        if key not in _SHORT and value != ExecutionConfig.model_fields[key].default:
            words.append(f"{key}={value}")
    return words
