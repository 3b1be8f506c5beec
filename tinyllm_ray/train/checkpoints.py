"""A run's folder of checkpoints: each appears and goes in one step, and the newest intact one is found.

A checkpoint is written into a folder of another name, which then takes its own. Writers hold a shared lock: who gets
it alone knows that what such folders are there were left by killed ones.
"""

import contextlib
import fcntl
import logging
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import nn

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from tinyllm_ray.train.manifest import MANIFEST, DamagedError
from tinyllm_ray.train.weights import CheckpointWriteError, sync

log = logging.getLogger(__name__)

FOLDER = "checkpoints"

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(writing|removing)-[0-9a-f]{16}")
_ABANDONED_SECONDS = 86_400.0  # on file systems without locks: nobody writes a checkpoint for a day


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    config: Config,
    cache_identity: str,
    *,
    average: bool = False,
) -> Path:
    """Write a checkpoint into the folder `run`, which must exist, and return its folder when it is on the disk.

    Without an optimizer it holds weights only, and no progress. With `average` it also holds the mean of a packed
    model's weights, which is what is evaluated where workers are mixed; a lone model is its own.

    An intact checkpoint of the same step and recipe stays as it is; a damaged one, or one of weights where training is
    to be saved, is replaced. Raises CheckpointWriteError where it cannot be written; nothing is left of it then, and no
    other is touched.
    """
    target = run / FOLDER / f"step-{step:08d}"
    try:
        _make_folder(run)
        with _writing(target) as temporary:
            if _stays(target, optimizer is not None, config, cache_identity):
                log.info("%s: is there already, intact, and stays", target)
                return target
            temporary.mkdir()
            write_checkpoint(temporary, step, model, optimizer, progress, config, cache_identity, average=average)
            if target.exists():
                _remove(target)
            try:
                temporary.rename(target)
            except OSError:
                # Another writer of the same step may have come first.
                if not _stays(target, optimizer is not None, config, cache_identity):
                    raise
            sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(f"{target}: not written: {error}") from error
    return target


def find_checkpoint(source: Path) -> Checkpoint:
    """The newest intact checkpoint of a run's folder or of its `checkpoints`, or the one whose folder is given.

    Every file is read and its checksum compared. A damaged checkpoint is logged, and the one before it taken. Raises
    ConfigError naming what was found where nothing is intact.
    """
    if (source / MANIFEST).exists() or _NAME.fullmatch(source.name):
        return open_checkpoint(source)
    folder = _folder_of(source)
    damaged: dict[Path, str] = {}
    while True:
        paths = _checkpoints(folder)
        for path in reversed(paths):
            if path in damaged:
                continue
            try:
                checkpoint = _open_named(path)
            except DamagedError as error:
                if path.exists():  # else a running training removed it since
                    damaged[path] = str(error)
                    log.warning("%s; taking the checkpoint before it", error)
                continue
            return checkpoint
        if _checkpoints(folder) == paths:
            break
    raise ConfigError(f"{folder}: no intact checkpoint: " + ("; ".join(damaged.values()) or "there is none"))


def prune(run: Path, keep: int | None, always: Collection[int] = (), trusted: Collection[int] = ()) -> list[int]:
    """Remove the checkpoints that are older than the newest `keep` intact ones; the steps that went, newest first.

    None keeps all; those of the steps `always` stay. With fewer than `keep` intact ones nothing goes, and a damaged
    one goes only when it is older than them. Every byte of those that count is read, but of the steps `trusted`, which
    the caller wrote or verified itself, only the manifest. Raises CheckpointWriteError where one cannot be removed.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    removed: list[int] = []
    intact = 0
    for path in reversed(_checkpoints(run / FOLDER)):
        step = _step(path)
        if intact < keep:
            with contextlib.suppress(DamagedError):
                _open_named(path, checksums=step not in trusted)
                intact += 1
        elif step not in always:
            try:
                _remove(path)
            except OSError as error:
                raise CheckpointWriteError(f"{path}: not removed: {error}") from error
            removed.append(step)
    return removed


def _make_folder(run: Path) -> None:
    folder = run / FOLDER
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)  # without parents: a run whose folder was removed does not bring it back
        sync(run)


def _stays(target: Path, training: bool, config: Config, cache_identity: str) -> bool:
    try:
        found = _open_named(target)
    except DamagedError:
        return False
    same = (found.manifest.recipe_identity, found.manifest.cache_identity) == (config.recipe_identity, cache_identity)
    return same and found.has_training >= training


def _open_named(path: Path, *, checksums: bool = True) -> Checkpoint:
    checkpoint = open_checkpoint(path, checksums=checksums)
    if checkpoint.step != _step(path):
        raise DamagedError(f"{path / MANIFEST}: is of step {checkpoint.step}")
    return checkpoint


def _folder_of(source: Path) -> Path:
    if (source / FOLDER).is_dir():
        return source / FOLDER
    if _checkpoints(source):
        return source
    if not source.is_dir():
        raise ConfigError(f"{source}: is no folder; choose a run's folder, its {FOLDER}, or one checkpoint's")
    held = ", ".join(sorted(path.name for path in source.iterdir())[:10]) or "nothing"
    raise ConfigError(f"{source}: holds no checkpoints, but {held}; choose a run's folder")


def _checkpoints(folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, in the order of their steps."""
    try:
        return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _temporary(target: Path, doing: str) -> Path:
    return target.with_name(f".{target.name}.{doing}-{secrets.token_hex(8)}")


def _remove(target: Path) -> None:
    """A folder that is half gone has no checkpoint's name; what cannot be deleted is left to the next writer."""
    aside = _temporary(target, "removing")
    with contextlib.suppress(FileNotFoundError):  # another process removed it first
        target.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A name to write `target` under, which no other writer takes for a leftover, and which is gone afterwards."""
    temporary = _temporary(target, "writing")
    with (target.parent / ".lock").open("a+b") as lock:  # network file systems lock what is open for both
        _clean(target.parent, lock)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _clean(folder: Path, lock: BinaryIO) -> None:
    """Remove what killed writers left, unless another writer lives."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        oldest_living = float("inf")
    except BlockingIOError:
        return
    except OSError:  # no locks on this file system
        oldest_living = time.time() - _ABANDONED_SECONDS
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and _modified(path) < oldest_living:
            shutil.rmtree(path, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")
