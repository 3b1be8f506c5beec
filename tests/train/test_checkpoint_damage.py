"""Whatever happened to a checkpoint's files is seen, and said with the file's name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import CACHE, Training
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint, open_checkpoint
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.manifest import DamagedError

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def saved(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint, which is as it was after every test."""
    trained = Training(config)
    return save_checkpoint(tmp_path_factory.mktemp("run"), 3, trained.model, trained.optimizer, {}, config, CACHE)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


NAMES = ("model.safetensors", "training.pt", "checkpoint.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(DamagedError, match=f"{copy / name}: cannot be read: No such file"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_truncated_file(copy: Path, name: str, left: int) -> None:
    data = (copy / name).read_bytes()
    # The manifest's last byte is a newline, which is no content.
    (copy / name).write_bytes(data[: left if left >= 0 or name != "checkpoint.json" else -2])
    for checksums in (True, False):
        with pytest.raises(DamagedError, match=str(copy / name)):
            open_checkpoint(copy, checksums=checksums)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_grew(copy: Path, name: str) -> None:
    with (copy / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedError, match=str(copy / name)):
        open_checkpoint(copy)


@settings(max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from(NAMES[:2]))
def test_a_flipped_bit_anywhere(saved: Path, where: float, bit: int, name: str) -> None:
    path = saved / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[int(where * len(data))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        with pytest.raises(DamagedError, match=f"{path}: is damaged: its SHA-256"):
            open_checkpoint(saved)
        assert open_checkpoint(saved, checksums=False).step == 3
    finally:
        path.write_bytes(data)


@settings(max_examples=100)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_manifest_never_changes_what_it_says(saved: Path, where: float, bit: int) -> None:
    path = saved / "checkpoint.json"
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[int(where * len(data))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        manifest = open_checkpoint(saved).manifest
    except DamagedError:
        return
    finally:
        path.write_bytes(data)
    assert manifest == open_checkpoint(saved).manifest  # one white space for another


@pytest.mark.parametrize(
    "junk", [b"", b"junk", b"\x00" * 500, b"\xff\xfe", b"null", b"[]", b"{}", b'"a"', b"[" * 100_000, b"NaN"]
)
def test_a_manifest_of_junk(copy: Path, junk: bytes) -> None:
    (copy / "checkpoint.json").write_bytes(junk)
    with pytest.raises(DamagedError, match=r"checkpoint\.json: is damaged") as error:
        open_checkpoint(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_in_a_files_place(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    with pytest.raises(DamagedError, match=str(copy / name)):
        open_checkpoint(copy)


def test_a_setting_changed_by_hand(copy: Path) -> None:
    path = copy / "checkpoint.json"
    path.write_text(path.read_text().replace('"micro_batch_size": 4', '"micro_batch_size": 8'))
    with pytest.raises(DamagedError, match=r"checkpoint\.json: is damaged: its content"):
        open_checkpoint(copy)


def test_a_later_schema_is_named(copy: Path) -> None:
    values = json.loads((copy / "checkpoint.json").read_text())
    (copy / "checkpoint.json").write_text(json.dumps(values | {"schema_version": 2, "more": 1}))
    with pytest.raises(DamagedError, match="has schema_version 2, this version reads 1"):
        open_checkpoint(copy)


def test_no_code_is_run_from_a_file(saved: Path, tmp_path: Path, config: Config) -> None:
    """Whoever writes a file can write its checksum too, so nothing but data is ever unpickled."""
    marker = tmp_path / "ran"
    torch.save({"progress": Runs(marker)}, tmp_path / "training.pt")
    checkpoint, other = Checkpoint(tmp_path, open_checkpoint(saved).manifest), Training(config, updates=0)
    with pytest.raises(ConfigError, match=r"training\.pt: cannot be read"):
        checkpoint.load_training(other.model, other.optimizer)
    assert not marker.exists()


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)
