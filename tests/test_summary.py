"""A study's summary, read strictly or as far as it can be read."""

import json
import re
from pathlib import Path

import pytest

from tinyllm_ray.errors import TinyllmRayError
from tinyllm_ray.summary import SUMMARY, find_summary, read_summary


def test_what_is_there_is_read_and_what_is_not_is_empty(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == find_summary(tmp_path) == {}
    (tmp_path / SUMMARY).write_text('{"study": "s"}')
    assert read_summary(tmp_path) == find_summary(tmp_path) == {"study": "s"}


@pytest.mark.parametrize("content", [b"", b'{"study": ', b"[]", b"null", b"\xff"])
def test_a_damaged_one_is_said_or_done_without(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SUMMARY).write_bytes(content)
    with pytest.raises(TinyllmRayError, match=f"{SUMMARY} is damaged: "):
        read_summary(tmp_path)
    assert find_summary(tmp_path) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget_seconds", "soon"),
        ("budget_seconds", True),
        ("verdict", 3),
        ("baseline", ["c01"]),
        ("selected", {"fate": "complete"}),
        ("candidates", [1]),
        ("candidates", [{"candidate": None}]),
        ("winners", {"tokens": 1}),
        ("devices", 3),
    ],
)
def test_a_value_of_another_form_is_said_and_what_to_do(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / SUMMARY).write_text(json.dumps({"study": "s", key: value}))
    words = f"{SUMMARY} is damaged: {key}: {json.dumps(value)}; delete the file, the records are enough"
    with pytest.raises(TinyllmRayError, match=re.escape(words)):
        read_summary(tmp_path)
    assert find_summary(tmp_path) == {}


def test_what_a_study_writes_is_well_formed(tmp_path: Path) -> None:
    named = {"candidate": "c01", "fate": "complete"}
    whole = {
        "baseline": named,
        "selected": None,
        "candidates": [named],
        "ties": ["c02"],
        "budget_seconds": 60,
        "more": 1,
    }
    (tmp_path / SUMMARY).write_text(json.dumps(whole))
    assert read_summary(tmp_path) == whole


def test_one_that_cannot_be_read_is_said_or_done_without(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).mkdir()
    with pytest.raises(TinyllmRayError, match=f"{SUMMARY} cannot be read: Is a directory"):
        read_summary(tmp_path)
    assert find_summary(tmp_path) == {}


def test_a_folder_that_is_none_has_no_summary(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_summary(tmp_path / "file") == {}
