"""What a resumed study has left of its budget."""

from pathlib import Path

import pytest

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune.budget import SUMMARY, seconds_left, spent_seconds


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
