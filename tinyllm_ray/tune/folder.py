"""A study's folder: what makes it a study's, and whether another may begin or go on there.

OUT/study.yaml       what is studied; written first
OUT/trials.jsonl     a TrialRecord a line
OUT/candidates/      a configuration and a log a candidate, and what the selected one compiled
OUT/selected.yaml    the configuration to use, and what is promised of it (section tuned)
OUT/summary.json     the study as it stands
"""

import os
import secrets
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tinyllm_ray import journal
from tinyllm_ray.config import Config, identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.tune.budget import spent_seconds
from tinyllm_ray.tune.mirror import leftover_records
from tinyllm_ray.tune.request import StudyRequest
from tinyllm_ray.yamlfile import dump_yaml, read_mapping

DEFINITION = "study.yaml"
TRIALS = "trials.jsonl"
CANDIDATES = "candidates"
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


class Earlier(BaseModel):
    """What earlier sessions of a study left."""

    definition: Definition
    records: list[TrialRecord]
    spent_seconds: float


def open_folder(out: Path, resume: bool) -> Earlier | None:
    """What is there to go on from, None for a study that begins. Nothing is written. Raises ConfigError."""
    definition = out / DEFINITION
    if not definition.exists():
        if resume:
            raise ConfigError(f"--resume: {out} holds no study ({DEFINITION} is missing)")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: this is not an empty folder; choose another")
        if not os.access(next(parent for parent in (out, *out.parents) if parent.exists()), os.W_OK):
            raise ConfigError(f"--out {out}: it cannot be written there; choose another folder")
        return None
    if not resume:
        raise ConfigError(
            f"--out {out}: the folder already holds a study; add --resume to go on with it, or choose another"
        )
    try:
        known = Definition.model_validate(read_mapping(definition))
    except ValidationError as error:
        raise ConfigError(f"{definition}: damaged: {error.errors()[0]['msg']}") from None
    records = read_records(out / TRIALS)
    # What the folder lagged behind by when the last session was cut; the supervisor adds it to the file.
    records += [TrialRecord.model_validate(entry) for entry in leftover_records(known.study, out)]
    return Earlier(definition=known, records=records, spent_seconds=spent_seconds(out))


def begin_study(
    out: Path, earlier: Earlier | None, config: Config, fitted: FittedSpace, request: StudyRequest
) -> Definition:
    """Make the folder and its definition, or check that a resumption asks for the same. Raises ConfigError."""
    settled = {"baseline": fitted.baseline, "factors": fitted.factors, "when": fitted.when}
    space_identity = identity({**settled, "protocol": fitted.protocol.model_dump(mode="json")})
    if earlier is not None:
        _check_same(earlier.definition, config, space_identity)
        return earlier.definition
    definition = Definition(
        study=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        recipe_identity=config.recipe_identity,
        space=fitted.name,
        space_identity=space_identity,
        budget=request.budget,
        recipe=config.model_dump(mode="json"),
    )
    try:
        (out / CANDIDATES).mkdir(parents=True, exist_ok=True)
        journal.write_atomically(out / DEFINITION, dump_yaml(definition.model_dump(mode="json")).encode())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be written") from None
    return definition


def _check_same(known: Definition, config: Config, space_identity: str) -> None:
    if known.recipe_identity != config.recipe_identity:
        asked = config.model_dump(mode="json")
        changed = [
            f"{section}.{key} is {asked[section][key]!r}, was {value!r}"
            for section, values in known.recipe.items()
            for key, value in values.items()
            if section in asked and asked[section].get(key) != value
        ]
        raise ConfigError(f"--resume: the recipe is not that of the study: {'; '.join(changed) or 'another version'}")
    if known.space_identity != space_identity:
        raise ConfigError(
            f"--resume: the space or its protocol is not that of the study (space {known.space}); "
            "ask for the same, or begin a study in another folder"
        )
