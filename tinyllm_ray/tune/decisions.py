"""The decision file: which execution to use, by the shape of the recipe, the device and the versions.

One YAML file for any number of studies; trainings and sweeps look their recipe up in it. Studies add to it at their
end, several at once if need be: under a lock, and in one step.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tinyllm_ray import journal
from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.promise import Promise
from tinyllm_ray.validation import explain
from tinyllm_ray.yamlfile import dump_yaml, read_mapping

DECISIONS = "decisions.yaml"

LOCK_SECONDS = 5.0
"""For others to finish writing, which takes them milliseconds."""

_PAUSE_SECONDS = 0.02


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Shape(_Part):
    """What of a recipe its speed depends on: the sizes of everything an update computes, and nothing it learns by."""

    layers: int
    width: int
    heads: int
    ffn: int
    context: int
    vocab_size: int
    tokens_per_update: int
    models: int = 1
    topology: str | None = None
    scheme: str | None = None

    @classmethod
    def of(cls, config: Config) -> "Shape":
        model, packing = config.model, config.packing
        return cls(
            **{key: getattr(model, key) for key in ("layers", "width", "heads", "ffn", "context", "vocab_size")},
            tokens_per_update=config.training.tokens_per_update,
            models=packing.models,
            topology=packing.topology,
            scheme=packing.scheme,
        )


class Place(_Part):
    """Where a figure holds."""

    device: str
    """The GPU's or processor's name."""
    cores: int | None
    """Cores of a CPU; None for a GPU."""
    versions: dict[str, str | None]
    """Of torch, what it was built with, and this package."""


class Decision(_Part):
    """One entry."""

    shape: Shape
    place: Place
    execution: ExecutionConfig
    promise: Promise
    """As in the study's `selected.yaml`; its compiled file is named relative to the decision file, or absolutely."""
    speedup: float | None
    """Over the study's baseline."""
    date: str
    """When it was decided, ISO 8601."""

    @property
    def key(self) -> dict[str, Any]:
        """What it is looked up by, flat, in the words that people are told."""
        return key_of(self.shape, self.place)


class _File(_Part):
    schema_version: Literal[1] = 1
    decisions: list[Decision] = []


def key_of(shape: Shape, place: Place) -> dict[str, Any]:
    """What decisions are looked up by."""
    where = {"device": place.device, "cores": place.cores}
    return shape.model_dump() | where | place.versions


def read_decisions(path: Path) -> list[Decision]:
    """The decisions in a file. Raises ConfigError where it is missing or no such file."""
    try:
        return _File.model_validate(read_mapping(path)).decisions
    except ValidationError as error:
        raise ConfigError(explain(error, _File, str(path))) from None


def find(decisions: Sequence[Decision], shape: Shape, place: Place) -> Decision | None:
    """The decision for a recipe's shape at a place."""
    wanted = key_of(shape, place)
    return next((one for one in decisions if one.key == wanted), None)


def nearest(decisions: Sequence[Decision], shape: Shape, place: Place) -> tuple[Decision, list[str]] | None:
    """The decision that differs in fewest parts of the key, and these as `name theirs, here ours`; None of none."""
    wanted = key_of(shape, place)

    def apart(decision: Decision) -> list[str]:
        theirs = decision.key
        names = [name for name in wanted | theirs if theirs.get(name) != wanted.get(name)]
        return [f"{name} {theirs.get(name)}, here {wanted.get(name)}" for name in names]

    return min(((one, apart(one)) for one in decisions), key=lambda found: len(found[1]), default=None)


def add_decision(path: Path, decision: Decision, lock_seconds: float = LOCK_SECONDS) -> bool:
    """Put a decision into a file, in place of one with the same key; the others stay. Makes the file if need be.

    False where the one that stands is kept: another study's that was verified, where this one was not. Raises
    ConfigError where the file is something else, or cannot be written, or others hold its lock for too long.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, lock_seconds):
            known = read_decisions(path) if path.exists() else []
            before = find(known, decision.shape, decision.place)
            if (
                before
                and before.promise.study != decision.promise.study
                and before.promise.verified > decision.promise.verified
            ):
                return False
            kept = [one for one in known if one.key != decision.key]
            content = _File(decisions=[*kept, decision]).model_dump(mode="json")
            journal.write_atomically(path, dump_yaml(content).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return True


@contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Nobody else adds to the file meanwhile. Of a file beside it: the file itself is replaced by each that adds."""
    beside = path.with_name(f".{path.name}.lock")
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + seconds
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise ConfigError(f"{path}: others have held its lock ({beside.name}) for {seconds:.0f} s")
            time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
