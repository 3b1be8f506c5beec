"""A study's folder: where one begins, goes on, and is left alone."""

import errno
import fcntl
import secrets
from pathlib import Path

import pytest

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.tune import claim as claims
from tinyllm_ray.tune.claim import claim
from tinyllm_ray.tune.folder import Definition, open_folder
from tinyllm_ray.yamlfile import dump_yaml


def torn(folder: Path, name: str) -> Path:
    """What `write_atomically` leaves where it is killed."""
    path = folder / f".{name}.{secrets.token_hex(8)}.tmp"
    path.write_text("{")
    return path


def test_a_study_begins_where_there_is_nothing_with_and_without_resume(tmp_path: Path) -> None:
    """One command for a job that comes back, from its first time on."""
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        for resume in (False, True):
            assert open_folder(tmp_path / name, resume) is None
    assert not (tmp_path / "absent").exists()


def test_a_study_that_was_killed_before_it_was_one_is_not_in_the_way(tmp_path: Path) -> None:
    torn(tmp_path, "study.yaml")
    assert open_folder(tmp_path, resume=False) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigError, match="not an empty folder; choose another"):
        open_folder(tmp_path, resume)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"candidate": "c01"}\n', r"trials\.jsonl: line 1: "),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_records_that_are_none_are_said_on_one_line(tmp_path: Path, line: str | None, said: str) -> None:
    known = Definition(
        study="20260101-000000-abcdef", recipe_identity="r", space="s", space_identity="s", budget="1m", recipe={}
    )
    (tmp_path / "study.yaml").write_text(dump_yaml(known.model_dump(mode="json")))
    if line is None:
        (tmp_path / "trials.jsonl").mkdir()
    else:
        (tmp_path / "trials.jsonl").write_text(line)
    with pytest.raises(TinyllmRayError, match=said) as caught:
        open_folder(tmp_path, resume=True)
    assert "\n" not in str(caught.value)
    claims._HELD.popitem()[1].close()


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / ".summary.json.tmp"
    other.touch()
    torn(tmp_path, "summary.json")
    journal.remove_torn(tmp_path)
    journal.remove_torn(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == [other]


def test_two_sessions_of_a_study_do_not_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = tmp_path / "study.yaml"
    definition.touch()
    with definition.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another process's, since it is another opening of the file
        with pytest.raises(ConfigError, match="a session of this study is running; wait until it has ended, or end it"):
            claim(definition, patience_seconds=0)
    held = len(claims._HELD)
    claim(definition, patience_seconds=0)
    claim(definition, patience_seconds=0)
    assert len(claims._HELD) == held + 1
    claims._HELD.popitem()[1].close()


def test_a_killed_session_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = tmp_path / "study.yaml"
    definition.touch()
    other = definition.open()
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: other.close())
    claim(definition, patience_seconds=1e9)
    claims._HELD.popitem()[1].close()


def test_a_file_system_without_locks_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = tmp_path / "study.yaml"
    definition.touch()

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    claim(definition, patience_seconds=0)
    claims._HELD.popitem()[1].close()
