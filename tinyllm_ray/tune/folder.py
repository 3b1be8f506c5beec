"""A study's folder: what makes it a study's, and whether another may begin or go on there.

OUT/study.yaml       what is studied; written first, and locked by the session that goes on with it
OUT/trials.jsonl     a TrialRecord a line
OUT/sessions/        what each session has used of the budget
OUT/candidates/      a configuration and a log a candidate, and what the selected one compiled
OUT/callbacks/       what Ray Tune's callbacks write, a folder a candidate: TensorBoard's event files
OUT/selected.yaml    the configuration to use, and what is promised of it (section tuned)
OUT/summary.json     the study as it stands
"""

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tinyllm_ray import journal
from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.paths import is_there
from tinyllm_ray.records import TrialRecord, parse_records
from tinyllm_ray.search.fitting import DeviceKind, FittedSpace, fit_space
from tinyllm_ray.search.installed import lacking
from tinyllm_ray.tune.budget import sessions_so_far
from tinyllm_ray.tune.claim import claim
from tinyllm_ray.tune.mirror import all_records, await_earlier_helper
from tinyllm_ray.tune.request import Asked, StudyRequest
from tinyllm_ray.tune.same_study import refuse_other_study, settled_space, space_identity
from tinyllm_ray.yamlfile import dump_yaml, read_mapping

DEFINITION = "study.yaml"
TRIALS = "trials.jsonl"
CANDIDATES = "candidates"
CALLBACKS = "callbacks"
SELECTED = "selected.yaml"


class Definition(BaseModel):
    """What a study is about; a resumption has to agree with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str
    recipe_identity: str
    space: str
    space_identity: str
    budget: str
    recipe: dict[str, Any]
    settled_space: dict[str, Any] | None = None
    """The space as it was fitted, by name and value; None, here and below, where an earlier program began the study."""
    cores: int | None = None
    """CPU cores a trial could use."""
    device_kind: str | None = None
    accelerators: list[str] = []
    """Their models, where the cluster tells them."""
    cache_identity: str | None = None
    source: dict[str, Any] | None = None
    """sha256, revision and dirty of the package."""


class Earlier(BaseModel):
    """What earlier sessions of a study left."""

    definition: Definition
    records: list[TrialRecord]
    sessions: list[dict[str, Any]]
    """As `budget.sessions_so_far` has them."""

    @property
    def spent_seconds(self) -> float:
        """Of the budget, by all of them."""
        return float(sum(entry["seconds"] for entry in self.sessions))


def open_folder(out: Path, resume: bool) -> Earlier | None:
    """What is there to go on from, None for a study that begins. Nothing is written.

    Raises ConfigError, and TinyllmRayError where the records are damaged.

    With `resume` a study begins where there is none yet: one command for a job that comes back. A study that is gone
    on with is this process's from here to its end: no other session may run beside it.
    """
    definition = out / DEFINITION
    if not is_there(definition, "--out"):
        check_vacant(out)
        return None
    if not resume:
        raise ConfigError(
            f"--out {out}: the folder already holds a study; add --resume to go on with it, or choose another"
        )
    claim(definition)
    try:
        known = Definition.model_validate(read_mapping(definition))
    except ValidationError as error:
        raise ConfigError(f"{definition}: damaged: {error.errors()[0]['msg']}") from None
    await_earlier_helper(known.study)
    records = parse_records(all_records(known.study, out), out / TRIALS)
    return Earlier(definition=known, records=records, sessions=sessions_so_far(out))


def refuse_early(earlier: Earlier, asked: Asked, out: Path) -> None:
    """Refuse what the earlier sessions' machine would refuse, before Ray says what this one is. Raises ConfigError."""
    known = earlier.definition
    if known.device_kind is None or known.cores is None:
        return
    kind: DeviceKind = "cuda" if known.device_kind == "cuda" else "cpu"
    config, space, _ = asked.for_machine(kind)
    same = {"accelerators": known.accelerators, "cache_identity": known.cache_identity, "study": known.study}
    definition = _define(config, fit_space(space, config, kind, known.cores, lacking()), known.budget)
    refuse_other_study(known.model_dump(), definition.model_dump() | same, out)


def begin_study(
    out: Path,
    earlier: Earlier | None,
    config: Config,
    fitted: FittedSpace,
    request: StudyRequest,
    *,
    accelerators: Sequence[str] = (),
    cache_identity: str | None = None,
) -> Definition:
    """Make the folder and its definition, or check that a resumption asks for the same. Raises ConfigError."""
    machine = {"accelerators": list(accelerators), "cache_identity": cache_identity}
    asked = _define(config, fitted, request.budget).model_copy(update=machine)
    try:
        if earlier is not None:
            refuse_other_study(earlier.definition.model_dump(), asked.model_dump(), out)
            for folder in (out, out / CANDIDATES):
                journal.remove_torn(folder)
        else:
            out.mkdir(parents=True, exist_ok=True)
            # Ray's start and a cache's building lie between the look at the folder and this: another may have been.
            journal.write_first(out / DEFINITION, dump_yaml(asked.model_dump(mode="json")).encode())
            claim(out / DEFINITION)
            journal.remove_torn(out)
        (out / CANDIDATES).mkdir(exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--out {out}: another study has begun there meanwhile; choose another folder") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be written") from None
    return asked if earlier is None else earlier.definition


def _define(config: Config, fitted: FittedSpace, budget: str) -> Definition:
    source = source_identity()
    return Definition(
        study=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        recipe_identity=config.recipe_identity,
        space=fitted.name,
        space_identity=space_identity(fitted),
        budget=budget,
        recipe=config.model_dump(mode="json"),
        settled_space=settled_space(fitted),
        cores=fitted.cores,
        device_kind=fitted.device_kind,
        source={"sha256": source.sha256, "revision": source.revision, "dirty": source.dirty},
    )


def check_vacant(out: Path) -> None:
    """Raises ConfigError where a study cannot begin; one that was killed before it was one is not in the way."""
    if is_there(out, "--out") and (not out.is_dir() or any(not journal.is_torn(path) for path in out.iterdir())):
        raise ConfigError(f"--out {out}: this is not an empty folder; choose another")
    nearest = next(parent for parent in (out, *out.parents) if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--out {out}: {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: it cannot be written there; choose another folder")
