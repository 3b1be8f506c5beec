"""A process killed amid a checkpoint takes nothing with it: a whole one is always found, and leftovers go."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.config import Config


def killed(config: Config, folder: Path, models: int) -> dict[str, Any]:
    """What `killed_savers.py` found, by scenario."""
    (folder / "config.yaml").write_text(config.to_yaml())
    program = Path(__file__).with_name("killed_savers.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), str(folder / "config.yaml"), str(models)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "saver: " not in done.stderr, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def outcome(tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return killed(tiny(), tmp_path_factory.mktemp("kills"), models=0)


def test_fifty_kills_at_random_times_lose_no_finished_checkpoint(outcome: dict[str, Any]) -> None:
    """Every load is checked by the savers' program, weight by weight."""
    result = outcome["kill_at_random_times"]
    assert result["lost"] == []
    assert result["saved"] > 2


def test_kills_leave_temporary_folders_and_the_next_save_removes_them(outcome: dict[str, Any]) -> None:
    result = outcome["kill_at_random_times"]
    assert result["leftovers"] > 0  # else the kills never met a write
    assert result["left"] == []


def test_a_kill_at_any_step_of_replacing_and_pruning_leaves_a_whole_checkpoint(outcome: dict[str, Any]) -> None:
    check_kills_at_every_event(outcome["kill_at_every_event"])


def test_a_kill_at_any_step_leaves_a_whole_checkpoint_of_all_packed_models(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    check_kills_at_every_event(killed(tiny(), tmp_path, models=2)["kill_at_every_event"])


def check_kills_at_every_event(result: dict[str, Any]) -> None:
    outcomes = result["outcomes"]
    assert outcomes == sorted(outcomes)  # the old one until a certain step of it, from then on the other
    assert set(outcomes) == {2, 3}
    assert outcomes.count(2) > 5
    assert outcomes.count(3) > 1
    assert (result["status"], result["left"]) == (0, [])


def test_a_writer_that_lives_keeps_its_folder_while_another_saves(outcome: dict[str, Any]) -> None:
    result = outcome["save_beside_a_stopped_writer"]
    assert len(result["beside"]) == 1
    assert result["after"] == result["beside"]
    assert result["status"] == 0
    assert result["steps"] == ["step-00000001", "step-00000002", "step-00000003"]
    assert result["left"] == []
