"""Saves checkpoints where writing fails, and prints what came of it: `failing_savers.py limit|disk RUN CONFIG MODELS`.

`limit` bounds the size of files, `disk` mounts a small file system on RUN (in a namespace of its own) and fills it up
to every number of free pages. With MODELS of 0 it is one model that is saved, else a pack of so many.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from checkpoint_states import CACHE, PackedTraining, Training

from tinyllm_ray.config import load
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.weights import CheckpointWriteError

_PAGE = 4096


def limits(checkpoint: Path) -> Iterator[int]:
    """Sizes that cut the weights, and larger ones that cut the training state alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    for size in (*range(0, largest, 2 * _PAGE), largest - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def free_pages(run: Path) -> Iterator[int]:
    ballast, pages = run / "ballast", 0
    while True:
        state = os.statvfs(run)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (state.f_bavail - pages) * state.f_frsize)
        yield pages
        ballast.unlink()
        pages += 1


def main(kind: str, run: Path, config_file: Path, models: int) -> None:
    torch.set_num_threads(1)
    config = load(config_file)
    training = PackedTraining(config, models=models) if models else Training(config)

    def save(step: int) -> Path:
        return save_checkpoint(run, step, training.model, training.optimizer, {}, config, CACHE, average=True)

    if kind == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(run)], check=True)
    first = save(1)
    errors, left = [], set()
    for _ in limits(first) if kind == "limit" else free_pages(run):
        try:
            save(2)
        except CheckpointWriteError as error:
            errors.append(str(error))
            left |= {path.name for path in first.parent.iterdir()}
        else:
            break
        assert find_checkpoint(run).step == 1
    if kind == "limit":
        save(2)
    assert find_checkpoint(run).step == 2
    print(json.dumps({"errors": errors, "left": sorted(left)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
