"""A run's folder of checkpoints: what is found, what stays, and what a write that fails leaves."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import CACHE, Training, names, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoints import find_checkpoint, prune, save_checkpoint
from tinyllm_ray.train.manifest import DamagedError

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


def damage(checkpoint: Path, name: str = "model.safetensors") -> Path:
    """Flips the last byte of a file, whose size stays."""
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def content(checkpoint: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in checkpoint.iterdir()}


class TestFind:
    def test_the_newest_by_number_from_any_of_the_three_folders(self, save: Save, tmp_path: Path) -> None:
        paths = [save(step) for step in (9, 100_000_000, 99_999_999)]
        for source in (tmp_path, tmp_path / "checkpoints"):
            assert find_checkpoint(source).path == paths[1]
        assert [find_checkpoint(path).step for path in paths] == [9, 100_000_000, 99_999_999]

    @pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "checkpoint.json"])
    def test_a_damaged_newest_is_said_once_and_the_one_before_it_taken(
        self, save: Save, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        paths = [save(step) for step in (1, 2, 3)]
        bad = paths[2] / name
        bad.write_bytes(bad.read_bytes()[:-9])
        with caplog.at_level(logging.WARNING):
            assert find_checkpoint(tmp_path).path == paths[1]
        (record,) = caplog.records
        assert str(bad) in record.getMessage()

    def test_a_damaged_one_that_was_named_is_not_replaced_by_another(self, save: Save) -> None:
        save(1)
        bad = damage(save(2))
        with pytest.raises(DamagedError, match=str(bad)):
            find_checkpoint(bad.parent)
        (bad.parent / "checkpoint.json").unlink()
        with pytest.raises(DamagedError, match=r"checkpoint\.json: cannot be read"):
            find_checkpoint(bad.parent)

    def test_where_nothing_is_intact_everything_found_is_named(self, save: Save, tmp_path: Path) -> None:
        bad = [damage(save(1)), damage(save(2), "training.pt")]
        with pytest.raises(ConfigError, match="no intact checkpoint") as error:
            find_checkpoint(tmp_path)
        assert all(str(path) in str(error.value) for path in bad)
        assert "\n" not in str(error.value)

    def test_a_folder_without_checkpoints_is_told_with_what_it_holds(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=r"holds no checkpoints, but metrics\.jsonl"):
            find_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match="is no folder"):
            find_checkpoint(tmp_path / "gone")
        with pytest.raises(ConfigError, match="is no folder"):
            find_checkpoint(tmp_path / "metrics.jsonl")
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(ConfigError, match="no intact checkpoint: there is none"):
            find_checkpoint(tmp_path)

    def test_a_renamed_copy_is_found_when_it_is_named(self, save: Save, tmp_path: Path) -> None:
        copy = shutil.copytree(save(4), tmp_path / "best")
        assert find_checkpoint(Path(copy)).step == 4

    def test_a_copy_under_another_steps_name_is_not_taken_for_it(self, save: Save, tmp_path: Path) -> None:
        path = save(4)
        shutil.copytree(path, path.with_name("step-00000005"))
        assert find_checkpoint(tmp_path).path == path
        assert prune(tmp_path, 1) == []

    def test_what_has_no_checkpoints_name_is_left_out(self, save: Save, tmp_path: Path) -> None:
        path = save(4)
        for name in ("step-9", "step-00000009.bak", ".step-00000009.writing-0123456789abcdef", "latest"):
            shutil.copytree(path, tmp_path / "checkpoints" / name)
        assert find_checkpoint(tmp_path).step == 4


class TestSaveAgain:
    def test_an_intact_one_of_the_same_step_stays(self, save: Save, tmp_path: Path) -> None:
        before = content(save(2))
        assert content(save(2)) == before
        assert names(tmp_path) == [".lock", "step-00000002"]

    @pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "checkpoint.json"])
    def test_a_damaged_one_is_replaced(self, save: Save, tmp_path: Path, name: str) -> None:
        damage(save(2), name)
        (tmp_path / "checkpoints" / "step-00000002" / name).write_bytes(b"")
        save(2)
        assert find_checkpoint(tmp_path).step == 2
        assert names(tmp_path) == [".lock", "step-00000002"]

    def test_training_state_replaces_weights_alone_but_not_the_other_way(
        self, save: Save, tmp_path: Path, trained: Training, config: Config
    ) -> None:
        save_checkpoint(tmp_path, 2, trained.model, None, {}, config, CACHE)
        save(2)
        assert find_checkpoint(tmp_path).has_training
        save_checkpoint(tmp_path, 2, trained.model, None, {}, config, CACHE)
        assert find_checkpoint(tmp_path).has_training

    def test_another_recipes_is_replaced(self, save: Save, tmp_path: Path, trained: Training, tiny: MakeConfig) -> None:
        save(2)
        other = tiny(training={"seed": 43})
        save_checkpoint(tmp_path, 2, trained.model, trained.optimizer, {}, other, CACHE)
        assert find_checkpoint(tmp_path).config == other


class TestLeftovers:
    @pytest.mark.parametrize("doing", ["writing", "removing"])
    def test_those_of_killed_writers_go_with_the_next_save(self, save: Save, tmp_path: Path, doing: str) -> None:
        left = tmp_path / "checkpoints" / f".step-00000009.{doing}-0123456789abcdef"
        shutil.copytree(save(1), left)
        (tmp_path / "checkpoints" / ".mine").mkdir()
        save(2)
        assert names(tmp_path) == [".lock", ".mine", "step-00000001", "step-00000002"]

    def test_where_nothing_can_be_locked_only_old_ones_go(
        self, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Some network file systems have no locks, which cannot be had here."""

        def unsupported(file: Any, operation: int) -> None:
            raise OSError("No locks available")

        monkeypatch.setattr("fcntl.flock", unsupported)
        recent = tmp_path / "checkpoints" / ".step-00000009.writing-0123456789abcdef"
        old = tmp_path / "checkpoints" / ".step-00000008.writing-0123456789abcdef"
        for path in (recent, old):
            shutil.copytree(save(1), path)
        os.utime(old, (0, 0))
        save(2)
        assert recent.exists()
        assert not old.exists()


@pytest.fixture(scope="module")
def whole(config: Config, trained: Training, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """An intact checkpoint of every step up to 12."""
    run = tmp_path_factory.mktemp("whole")
    return {step: save_checkpoint(run, step, trained.model, trained.optimizer, {}, config, CACHE) for step in range(13)}


class TestPrune:
    def test_keeps_the_newest_and_those_that_always_stay(self, save: Save, tmp_path: Path) -> None:
        for step in range(1, 7):
            save(step)
        assert prune(tmp_path, None) == []
        assert prune(tmp_path, 2, always={1, 3}) == [4, 2]
        assert names(tmp_path) == [".lock", *(f"step-{step:08d}" for step in (1, 3, 5, 6))]
        assert find_checkpoint(tmp_path).step == 6

    def test_a_damaged_one_counts_for_nothing(self, save: Save, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(step)
        damage(tmp_path / "checkpoints" / "step-00000003")
        assert prune(tmp_path, 1) == [1]
        assert find_checkpoint(tmp_path).step == 2

    def test_of_what_the_caller_trusts_no_file_is_read(self, save: Save, tmp_path: Path) -> None:
        for step in (1, 2):
            damage(save(step))
        assert prune(tmp_path, 1) == []
        assert prune(tmp_path, 1, trusted={2}) == [1]
        (tmp_path / "checkpoints" / "step-00000002" / "training.pt").unlink()
        save(1)
        assert prune(tmp_path, 1, trusted={2}) == []

    def test_less_than_one_cannot_be_kept(self, save: Save, tmp_path: Path) -> None:
        save(1)
        with pytest.raises(ValueError, match="at least 1"):
            prune(tmp_path, 0)

    def test_a_run_without_checkpoints_has_nothing_to_remove(self, tmp_path: Path) -> None:
        assert prune(tmp_path, 1) == prune(tmp_path / "gone", 1) == []

    @settings(max_examples=60)
    @given(
        states=st.dictionaries(st.integers(0, 12), st.sampled_from(["intact", "flipped", "half", "empty"]), max_size=7),
        keep=st.none() | st.integers(1, 4),
        always=st.frozensets(st.integers(0, 12), max_size=3),
    )
    def test_no_intact_one_that_should_stay_goes(
        self, states: dict[int, str], keep: int | None, always: frozenset[int], whole: dict[int, Path]
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            (run / "checkpoints").mkdir()
            for step, state in states.items():
                path = Path(shutil.copytree(whole[step], run / "checkpoints" / whole[step].name))
                if state == "flipped":
                    damage(path)
                elif state == "half":
                    (path / "checkpoint.json").unlink()
                elif state == "empty":
                    shutil.rmtree(path)
                    path.mkdir()
            removed = prune(run, keep, always)
            assert sorted([*removed, *steps(run)]) == sorted(states)
            assert names(run) == [f"step-{step:08d}" for step in steps(run)]

            intact = sorted(step for step, state in states.items() if state == "intact")
            wanted = intact if keep is None else intact[-keep:]
            assert {*wanted, *(always & set(states))} <= set(steps(run))
            if keep is None or len(intact) < keep:
                assert removed == []
            else:
                stay = {*always, *wanted, *(step for step in states if step > wanted[0])}
                assert sorted(removed) == sorted(set(states) - stay)
