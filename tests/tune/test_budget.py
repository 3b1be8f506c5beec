"""What a resumed study has left of its budget."""

import os
from pathlib import Path

import pytest

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.summary import SUMMARY
from tinyllm_ray.tune import budget
from tinyllm_ray.tune.budget import seconds_left, spent_seconds


def test_a_study_that_begins_has_all_of_it(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"elapsed_seconds": 50}')
    assert seconds_left(60, tmp_path, resume=False) == 60
    assert seconds_left(60, tmp_path / "absent", resume=True) == 60


def test_a_resumed_one_has_the_rest(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"elapsed_seconds": 50.5}')
    assert spent_seconds(tmp_path) == 50.5
    assert seconds_left(60, tmp_path, resume=True) == 9.5


def test_nothing_left_is_said_with_what_to_change(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"elapsed_seconds": 78}')
    with pytest.raises(ConfigError, match="1m18s of the budget of 1m00s are spent; give a larger --budget"):
        seconds_left(60, tmp_path, resume=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"elapsed_seconds": null}', '{"elapsed_seconds": "x"}'])
def test_a_damaged_report_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / SUMMARY).write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json: cannot be read"):
        spent_seconds(tmp_path)


def test_a_folder_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a FIFO that nobody writes to blocks like a dead file system."""
    monkeypatch.setattr(budget, "_ANSWER_SECONDS", 0.3)
    os.mkfifo(tmp_path / SUMMARY)
    with pytest.raises(ConfigError, match=r"summary\.json: cannot be read \(its file system does not answer\)"):
        seconds_left(60, tmp_path, resume=True)


def test_a_report_longer_than_a_pipe_holds_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"candidates": "' + "c" * 300_000 + '", "elapsed_seconds": 50}')
    assert spent_seconds(tmp_path) == 50
