"""One checkpoint: what its folder holds, and how that is written, verified and loaded.

`model.safetensors` has the weights under the model's own names, `training.pt` optimizer, random generators and the
run's progress, `checkpoint.json` says what both belong to, with bytes and SHA-256 of each and a digest of itself.

Of a packed model each worker has a folder `workers/03` with its weights, named as a lone model's, and its optimizer's
state; the root's `training.pt` has the rest, and its `model.safetensors` the workers' average, where that is evaluated.
"""

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tinyllm_ray.config import Config, validate
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.train import training_state
from tinyllm_ray.train.manifest import (
    MANIFEST,
    TRAINING,
    WEIGHTS,
    DamagedError,
    FileEntry,
    Manifest,
    Source,
    read_manifest,
)
from tinyllm_ray.train.parts import WORKERS, Part, canonical_parameters, count_workers, parts_of
from tinyllm_ray.train.weights import fill_tensors, load_weights, sha256_of, sync, write_tensors


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

    @property
    def workers(self) -> int:
        """How many models are packed in it; 0 where it is of a lone one."""
        return self.manifest.workers

    def weights_path(self, worker: int | None = None) -> Path:
        """The file with the weights of a worker, or, without one, of what is evaluated: the lone model, or the average
        of workers that are mixed. Raises ConfigError where there is none such.
        """
        name = Part(worker).folder + WEIGHTS
        if name in self.manifest.files:
            return self.path / name
        if not self.workers:
            raise ConfigError(f"{self.path}: has no worker {worker}, but a lone model; leave the worker out")
        first, last = (f"{self.path}/{Part(at).folder}".rstrip("/") for at in (0, self.workers - 1))
        has = "no average of its models, which were not mixed" if worker is None else f"no worker {worker}"
        raise ConfigError(f"{self.path}: has {has}; choose one of its {self.workers} workers, {first} to {last}")

    def load_weights(self, model: nn.Module, worker: int | None = None) -> None:
        """Fill `model`, wherever it is: a packed one worker by worker, a lone one as `weights_path` says.

        Raises ConfigError naming the first difference, and changes nothing then.
        """
        if count_workers(model) and worker is None:
            self._refuse_other_count(model)
            fill_tensors([(part.weights(model), self.weights_path(part.worker)) for part in parts_of(model)])
        else:
            load_weights(model, self.weights_path(worker))

    def load_training(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put optimizer and random generators back, in place, and return the run's progress.

        Files are mapped, so that the state is in memory once, on the device. Raises ConfigError where there is none, or
        where it does not fit the model, and changes nothing then.
        """
        if not self.has_training:
            raise ConfigError(
                f"{self.path}: holds weights only, and a run cannot go on from it; choose one with {TRAINING}"
            )
        self._refuse_other_count(model)
        root = _map_training(self.path / TRAINING)
        states = {}
        for part in parts_of(model):
            path = self.path / part.folder / TRAINING
            states[part] = (_map_training(path) if part.folder else root)["optimizer"]
            try:
                training_state.check(model, optimizer, part, states[part])
            except ValueError as error:
                raise ConfigError(f"{path}: holds another model's state: {error}") from None
        for part, state in states.items():
            training_state.restore(model, optimizer, part, state)
        training_state.restore_random_state(model, root["random"])
        progress: dict[str, Any] = root["progress"]
        return progress

    def _refuse_other_count(self, model: nn.Module) -> None:
        there, here = self.workers, count_workers(model)
        if there != here:
            held, asked = (f"{count} packed models" if count else "a lone model" for count in (there, here))
            raise ConfigError(
                f"{self.path}: holds {held}, asked for {asked}; choose the configuration it was written with"
            )


def write_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    config: Config,
    cache_identity: str,
    *,
    average: bool = False,
) -> None:
    """Write a checkpoint's files into `folder`, the manifest last, and return when all are on the disk.

    Without an optimizer weights only; with `average` also the mean of a packed model's weights. Raises OSError or
    SafetensorError where that fails, TypeError for a progress that is not made of plain values.
    """
    _check_plain(progress, "progress")
    files = _write_models(folder, model, optimizer, progress)
    if average and count_workers(model):
        # Weight by weight as `PackedLlama.copy_average_to`, so that what is kept is what was evaluated, bit for bit.
        means = {name: weight.detach().mean(0) for name, weight in canonical_parameters(model).items()}
        files[WEIGHTS] = _write_weights(folder / WEIGHTS, means)
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


def _write_models(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, progress: dict[str, Any]
) -> dict[str, FileEntry]:
    """The files of every model, one after another, and what is common to all in the root's."""
    files: dict[str, FileEntry] = {}
    common = {"random": training_state.random_state(model), "progress": progress}
    packed = count_workers(model) > 0
    if packed:
        (folder / WORKERS).mkdir()
    for part in parts_of(model):
        place = folder / part.folder
        if packed:
            place.mkdir()  # without parents: a folder that was removed does not come back
        files[part.folder + WEIGHTS] = _write_weights(place / WEIGHTS, part.weights(model))
        if optimizer is not None:
            own = {"optimizer": training_state.capture(model, optimizer, part)}
            files[part.folder + TRAINING] = _write_training(place / TRAINING, own if packed else own | common)
            del own  # of a worker a copy, which has to be gone before the next one's is made
        if packed:
            sync(place)
    if packed:
        sync(folder / WORKERS)
        if optimizer is not None:
            files[TRAINING] = _write_training(folder / TRAINING, common)
    return files


def open_checkpoint(folder: Path, *, checksums: bool = True) -> Checkpoint:
    """The checkpoint of `folder`, verified: with `checksums` every byte, else what there is and its sizes.

    Raises DamagedError naming the file.
    """
    manifest = read_manifest(folder / MANIFEST)
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


def _map_training(path: Path) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return stored


def _write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> FileEntry:
    write_tensors(weights, path)
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_of(path))


def _write_training(path: Path, state: dict[str, Any]) -> FileEntry:
    with _HashingWriter(path) as file:
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
