"""Whatever happened to one worker's files damages the checkpoint of all packed models."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_states import CACHE, PackedTraining

from tinyllm_ray.config import Config
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.manifest import DamagedError, Manifest

NAMES = [f"workers/{worker:02d}/{name}" for worker in range(3) for name in ("model.safetensors", "training.pt")]
FILES = ["checkpoint.json", "model.safetensors", "training.pt", *NAMES]


@pytest.fixture(scope="module")
def config(tiny: Callable[..., Config]) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def trained(config: Config) -> PackedTraining:
    return PackedTraining(config)


@pytest.fixture(scope="module")
def saved(trained: PackedTraining, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint, which no test changes."""
    run = tmp_path_factory.mktemp("run")
    return save_checkpoint(run, 3, trained.model, trained.optimizer, {}, config, CACHE, average=True)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_of_any_worker_damages_the_whole(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(DamagedError, match=f"{copy / name}: cannot be read: No such file"):
        open_checkpoint(copy, checksums=False)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_workers_file_damages_the_whole(copy: Path, name: str) -> None:
    flip(copy / name)
    with pytest.raises(DamagedError, match=f"{copy / name}: is damaged"):
        open_checkpoint(copy)


def test_a_missing_worker_damages_the_whole(copy: Path) -> None:
    shutil.rmtree(copy / "workers/01")
    with pytest.raises(DamagedError, match=r"workers/01/model\.safetensors: cannot be read"):
        open_checkpoint(copy)


def test_the_one_before_is_taken_and_the_damaged_one_replaced(
    config: Config, trained: PackedTraining, tmp_path: Path
) -> None:
    def save(step: int) -> Path:
        return save_checkpoint(tmp_path, step, trained.model, trained.optimizer, {}, config, CACHE)

    save(1)
    flip(save(2) / "workers/02/training.pt")
    assert find_checkpoint(tmp_path).step == 1
    save(2)
    assert find_checkpoint(tmp_path).step == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    "removed",
    [
        "training.pt",
        "workers/00/training.pt",
        "workers/01/model.safetensors",
        "workers/00/model.safetensors",
    ],
)
def test_a_manifest_that_names_too_few_files_is_no_manifest(copy: Path, removed: str) -> None:
    """Whoever writes a manifest can seal it too: what it promises has to be a whole pack."""
    manifest = open_checkpoint(copy).manifest
    files = {name: entry for name, entry in manifest.files.items() if name != removed}
    seal(copy, manifest.model_copy(update={"files": files}))
    with pytest.raises(DamagedError, match=r"checkpoint\.json: is damaged"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/hostname", "workers/00/more.bin", "workers/3/training.pt", "training.pt\n"],
)
def test_a_manifest_names_no_file_that_is_not_a_checkpoints(copy: Path, name: str) -> None:
    manifest = open_checkpoint(copy).manifest
    files = {**manifest.files, name: manifest.files["training.pt"]}
    seal(copy, manifest.model_copy(update={"files": files}))
    with pytest.raises(DamagedError, match=r"checkpoint\.json: is damaged: files"):
        open_checkpoint(copy)


def seal(checkpoint: Path, manifest: Manifest) -> None:
    (checkpoint / "checkpoint.json").write_text(manifest.sealed().model_dump_json())
