"""A model's weights on disk: safetensors under the model's own names."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.train.parts import canonical_parameters


class CheckpointWriteError(TinyllmRayError):
    """Weights or a checkpoint could not be written or removed; the others are as they were."""


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the weights of `model` to the file `path`, atomically. Raises CheckpointWriteError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_tensors(canonical_parameters(model), temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointWriteError(f"{path}: not written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill `model` from the file `path`, weight by weight.

    Raises ConfigError, and changes nothing, when the file is missing, damaged or holds another model.
    """
    fill_tensors([(canonical_parameters(model), path)])


def fill_tensors(places: Sequence[tuple[Mapping[str, torch.Tensor], Path]]) -> None:
    """Fill tensors from files, each file's names and shapes being those of its tensors; one tensor is read at a time.

    Raises ConfigError, and changes nothing, when a file is missing, damaged or holds other tensors.
    """
    for wanted, path in places:
        with _opened(path) as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _refuse_other_shapes(path, shapes, {name: list(weight.shape) for name, weight in wanted.items()})
    for wanted, path in places:
        with _opened(path) as file, torch.no_grad():
            for name, weight in wanted.items():
                weight.copy_(file.get_tensor(name))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: no such checkpoint, or it cannot be read: {error}") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: damaged, or no checkpoint: {error}") from None


def _refuse_other_shapes(path: Path, stored: dict[str, list[int]], wanted: dict[str, list[int]]) -> None:
    for name in sorted(stored.keys() | wanted.keys()):
        there, here = stored.get(name, "missing"), wanted.get(name, "missing")
        if there != here:
            raise ConfigError(
                f"{path}: holds another model: {name} is {there} in the file and {here} in the configuration's model; "
                "choose the configuration it was written with"
            )


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the file `path` and return when it is on the disk. Raises OSError or SafetensorError."""
    on_host = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # as the user's mask has it; safetensors 0.8 leaves files for their owner only
    save_file(on_host, path, metadata={"format": "pt"})
    path.chmod(mode)
    sync(path)


def sync(path: Path) -> None:
    """Return when the file, or the entries of the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
