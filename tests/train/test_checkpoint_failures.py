"""A checkpoint that cannot be written is one error; the earlier ones are as they were, and nothing else is there."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import CACHE, PackedTraining, Training, names, steps

from tinyllm_ray.config import Config
from tinyllm_ray.train.checkpoints import find_checkpoint, prune, save_checkpoint
from tinyllm_ray.train.weights import CheckpointWriteError

MakeConfig = Callable[..., Config]
Save = Callable[[int], Path]


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def trained(config: Config) -> Training:
    return Training(config)


@pytest.fixture
def save(trained: Training, config: Config, tmp_path: Path) -> Save:
    """Saves a step into the run's folder `tmp_path`."""
    return lambda step: save_checkpoint(tmp_path, step, trained.model, trained.optimizer, {"at": step}, config, CACHE)


@pytest.fixture
def fail(tiny: MakeConfig, tmp_path: Path) -> Callable[..., Any]:
    """Runs `failing_savers.py` on the run's folder `tmp_path / "run"`."""

    def run(kind: str, *prefix: str, models: int = 0) -> Any:
        (tmp_path / "run").mkdir()
        config = tiny(model={"layers": 1}) if models else tiny()
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        program = [sys.executable, str(Path(__file__).with_name("failing_savers.py"))]
        done = subprocess.run(
            [*prefix, *program, kind, str(tmp_path / "run"), str(tmp_path / "config.yaml"), str(models)],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_file_that_cannot_grow_at_any_place(fail: Callable[..., Any], tmp_path: Path) -> None:
    result = fail("limit")
    assert len(result["errors"]) > 9
    assert all("step-00000002: not written: " in error for error in result["errors"])
    assert all("File too large" in error for error in result["errors"])
    assert result["left"] == [".lock", "step-00000001"]
    assert find_checkpoint(tmp_path / "run").step == 2


@pytest.mark.parametrize("models", [0, 2])
def test_a_disk_that_fills_at_any_page(fail: Callable[..., Any], tmp_path: Path, models: int) -> None:
    """A file system of its own that fills up; where none can be mounted, files that may not grow."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if can_mount(namespace, tmp_path):
        result, reason, least = fail("disk", *namespace, models=models), "No space left", 50
    else:
        result, reason, least = fail("limit", models=models), "File too large", 9
    assert len(result["errors"]) > least
    assert all("step-00000002: not written: " in error for error in result["errors"])
    assert all(reason in error for error in result["errors"])
    assert result["left"] == [".lock", "step-00000001"]


def can_mount(namespace: list[str], folder: Path) -> bool:
    try:
        subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def test_a_run_whose_folder_was_removed_is_not_brought_back(save: Save, tmp_path: Path) -> None:
    save(1)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointWriteError, match=r"step-00000002: not written: .*No such file"):
        save(2)
    assert not tmp_path.exists()


@pytest.mark.parametrize("removed", [".", "checkpoints"])
@pytest.mark.parametrize(("models", "at"), [(0, 2), (2, 2), (2, 3), (2, 6), (2, 8)])
def test_a_folder_that_is_removed_on_the_way(
    config: Config, tmp_path: Path, models: int, at: int, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = PackedTraining(config, models=models) if models else Training(config)

    def save(step: int) -> None:
        save_checkpoint(tmp_path, step, training.model, training.optimizer, {}, config, CACHE)

    save(1)
    whole = os.fsync
    calls = []

    def remove_then_sync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            shutil.rmtree(tmp_path / removed)
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", remove_then_sync)
    with pytest.raises(CheckpointWriteError, match="No such file"):
        save(2)
    assert not (tmp_path / "checkpoints").exists()


def test_a_folder_that_cannot_be_written(config: Config, trained: Training) -> None:
    with as_nobody():
        run = Path(tempfile.mkdtemp())
        try:
            path = save_checkpoint(run, 1, trained.model, trained.optimizer, {}, config, CACHE)
            path.parent.chmod(0o500)
            with pytest.raises(CheckpointWriteError, match="Permission denied"):
                save_checkpoint(run, 2, trained.model, trained.optimizer, {}, config, CACHE)
            assert names(run) == [".lock", "step-00000001"]
            assert find_checkpoint(run).step == 1
            path.parent.chmod(0o700)
            save_checkpoint(run, 0, trained.model, trained.optimizer, {}, config, CACHE)
            path.parent.chmod(0o500)
            with pytest.raises(CheckpointWriteError, match=r"step-00000000: not removed: .*Permission denied"):
                prune(run, 1)
            assert steps(run) == [0, 1]
        finally:
            path.parent.chmod(0o700)
            shutil.rmtree(run)


def test_a_file_in_the_folders_place(save: Save, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointWriteError, match="File exists"):
        save(1)


def test_what_ends_the_program_amid_a_write_leaves_nothing_either(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(2)
    assert names(tmp_path) == [".lock", "step-00000001"]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions do not bind root, so root takes another user's rights meanwhile."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
