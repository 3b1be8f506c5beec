"""One checkpoint: what its folder holds, and how that is written, verified and loaded.

`model.safetensors` has the weights under the model's own names, `training.pt` optimizer, random generators and the
run's progress, `checkpoint.json` says what both belong to, with bytes and SHA-256 of each and a digest of itself.
"""

import hashlib
import io
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from tinyllm_ray.config import Config, identity, validate
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.train import training_state
from tinyllm_ray.train.weights import load_weights, sha256_of, sync, write_tensors

WEIGHTS: Final = "model.safetensors"
TRAINING: Final = "training.pt"
MANIFEST: Final = "checkpoint.json"


class DamagedError(ConfigError):
    """A checkpoint is not what was written; the message names the file and what is wrong with it."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Stored):
    """A file as it was written."""

    bytes: int
    sha256: str


class Source(_Stored):
    """Which source of this package wrote the checkpoint; revision and state are git's, None outside a checkout."""

    sha256: str
    revision: str | None
    dirty: bool | None


class Manifest(_Stored):
    """The content of `checkpoint.json`."""

    schema_version: Literal[1] = 1
    step: int
    """Updates behind the weights."""
    config: dict[str, Any]
    recipe_identity: str
    cache_identity: str
    source: Source
    torch: str
    files: dict[Literal["model.safetensors", "training.pt"], FileEntry]
    digest: str = ""
    """SHA-256 over everything else in this file."""

    def sealed(self) -> "Manifest":
        return self.model_copy(update={"digest": _digest(self.model_dump(mode="json"))})


def _digest(values: dict[str, Any]) -> str:
    return identity({key: value for key, value in values.items() if key != "digest"})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found intact."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def config(self) -> Config:
        """The configuration it was written under. Raises ConfigError where this version does not know a setting."""
        return validate(self.manifest.config, str(self.path / MANIFEST))

    @property
    def has_training(self) -> bool:
        """Whether a run can go on from it; else it holds weights only."""
        return TRAINING in self.manifest.files

    def load_weights(self, model: nn.Module) -> None:
        """Fill `model`, wherever it is. Raises ConfigError naming the first difference."""
        load_weights(model, self.path / WEIGHTS)

    def load_training(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put optimizer and random generators back, in place, and return the run's progress.

        The file is mapped, so that the state is in memory once, on the device. Raises ConfigError where there is
        none, or where it does not fit the model.
        """
        path = self.path / TRAINING
        if not self.has_training:
            raise ConfigError(
                f"{self.path}: holds weights only, and a run cannot go on from it; choose one with {path.name}"
            )
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        try:
            training_state.restore(model, optimizer, stored)
        except ValueError as error:
            raise ConfigError(f"{path}: holds another model's state: {error}") from None
        progress: dict[str, Any] = stored["progress"]
        return progress


def write_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    config: Config,
    cache_identity: str,
) -> None:
    """Write a checkpoint's files into `folder`, the manifest last, and return when all are on the disk.

    Without an optimizer weights only. Raises OSError or SafetensorError where that fails, TypeError for a progress
    that is not made of plain values.
    """
    _check_plain(progress, "progress")
    files: dict[Literal["model.safetensors", "training.pt"], FileEntry] = {WEIGHTS: _write_weights(folder, model)}
    if optimizer is not None:
        files[TRAINING] = _write_training(folder, {**training_state.capture(model, optimizer), "progress": progress})
    source = source_identity()
    manifest = Manifest(
        step=step,
        config=config.model_dump(mode="json"),
        recipe_identity=config.recipe_identity,
        cache_identity=cache_identity,
        source=Source(sha256=source.sha256, revision=source.revision, dirty=source.dirty),
        torch=torch.__version__,
        files=files,
    ).sealed()
    with (folder / MANIFEST).open("wb") as file:
        file.write(manifest.model_dump_json(indent=2).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def open_checkpoint(folder: Path, *, checksums: bool = True) -> Checkpoint:
    """The checkpoint of `folder`, verified: with `checksums` every byte, else what there is and its sizes.

    Raises DamagedError naming the file.
    """
    manifest = _read_manifest(folder / MANIFEST)
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != entry.bytes:
                raise DamagedError(f"{path}: is damaged: {found} bytes, {entry.bytes} were written")
            if checksums and sha256_of(path) != entry.sha256:
                raise DamagedError(f"{path}: is damaged: its SHA-256 is another than what was written")
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    return Checkpoint(folder, manifest)


def _read_manifest(path: Path) -> Manifest:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: is damaged: no JSON ({error})") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version != 1:
        raise DamagedError(f"{path}: has schema_version {version}, this version reads 1")
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path}: is damaged: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    if manifest.digest != _digest(values) or WEIGHTS not in manifest.files:
        raise DamagedError(f"{path}: is damaged: its content is another than what was written")
    return manifest


def _write_weights(folder: Path, model: nn.Module) -> FileEntry:
    path = folder / WEIGHTS
    write_tensors(model, path)
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))


def _write_training(folder: Path, state: dict[str, Any]) -> FileEntry:
    with _HashingWriter(folder / TRAINING) as file:
        try:
            torch.save(state, file)
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(bytes=file.tell(), sha256=file.digest.hexdigest())


class _HashingWriter(io.BufferedWriter):
    """Hashes what passes, and keeps the file's error, which torch.save hides behind one of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


_PLAIN = {type(None), bool, int, float, str}


def _check_plain(value: Any, where: str) -> None:
    """By exact type: numpy's float64 is a float, and could be written but not loaded."""
    if type(value) is dict:
        for key, inner in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(inner, f"{where}[{key!r}]")
    elif type(value) in {list, tuple}:
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise TypeError(f"{where} is of type {type(value).__name__}, which no checkpoint holds; give plain values")
