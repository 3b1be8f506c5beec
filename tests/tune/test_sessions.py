"""What every session of a study used of the budget, killed ones included."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.summary import SUMMARY
from tinyllm_ray.tune.budget import seconds_left, sessions_so_far, spent_seconds
from tinyllm_ray.tune.sessions import SESSIONS, read_sessions, with_reported, with_trials, write_session


def session(name: str | None, began: float | None, seconds: float, ended: bool = False) -> dict[str, Any]:
    return {"session": name, "began": began, "seconds": seconds, "ended": ended}


def test_a_sessions_file_says_how_long_it_lasts_as_it_goes(tmp_path: Path) -> None:
    now = time.monotonic()
    write_session(tmp_path, "monday", now - 40, now - 10, ended=False)
    (first,) = read_sessions(tmp_path)
    write_session(tmp_path, "monday", now - 40, now, ended=True)
    (second,) = read_sessions(tmp_path)
    assert (first["session"], first["ended"], second["ended"]) == ("monday", False, True)
    assert (first["seconds"], second["seconds"]) == (pytest.approx(30), pytest.approx(40))
    assert first["began"] == pytest.approx(time.time() - 40, abs=5)


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_session(tmp_path / "gone", "monday", 0.0, 1.0, ended=False)
    assert not (tmp_path / "gone").exists()
    assert read_sessions(tmp_path / "gone") == []


def test_sessions_come_oldest_first_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    (tmp_path / SESSIONS).mkdir()
    for name, began in (("b", 2.0), ("a", 3.0), ("c", 1.0)):
        (tmp_path / SESSIONS / f"{name}.json").write_text(json.dumps(session(name, began, 1.0)))
    assert [entry["session"] for entry in read_sessions(tmp_path)] == ["c", "b", "a"]
    (tmp_path / SESSIONS / "b.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"summary\.json: cannot be read \(sessions/b\.json is damaged"):
        spent_seconds(tmp_path)


def test_a_killed_session_is_charged_beyond_its_last_report(tmp_path: Path) -> None:
    """Its helper saw when it was killed; the report is that of its last trial."""
    (tmp_path / SESSIONS).mkdir()
    for entry in (session("a", 1.0, 30.0, ended=True), session("b", 100.0, 25.0)):
        (tmp_path / SESSIONS / f"{entry['session']}.json").write_text(json.dumps(entry))
    reported = [session("a", 1.0, 30.0, ended=True), session("b", 100.0, 8.0)]
    (tmp_path / SUMMARY).write_text(json.dumps({"elapsed_seconds": 38.0, "sessions": reported}))
    assert spent_seconds(tmp_path) == 55.0
    assert seconds_left(60, tmp_path, resume=True) == 5.0
    assert [entry["seconds"] for entry in sessions_so_far(tmp_path)] == [30.0, 25.0]


def test_what_a_report_knows_better_counts() -> None:
    """A power failure takes the helper as well, up to five seconds after its last sign of life."""
    files = [session("a", 1.0, 30.0), session("b", 100.0, 5.0)]
    reported = [session("a", 1.0, 30.0), session("b", 100.0, 9.0), session("c", 200.0, 2.0)]
    found = with_reported(files, {"elapsed_seconds": 41.0, "sessions": reported})
    assert [(entry["session"], entry["seconds"]) for entry in found] == [("a", 30.0), ("b", 9.0), ("c", 2.0)]
    assert files[1]["seconds"] == 5.0


def test_a_summary_without_sessions_is_one_session(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text('{"elapsed_seconds": 50}')
    assert sessions_so_far(tmp_path) == [session(None, None, 50.0)]
    assert with_reported([session("a", 1.0, 70.0)], {"elapsed_seconds": 50}) == [session("a", 1.0, 70.0)]


def test_a_trial_belongs_to_the_session_it_began_in() -> None:
    sessions = [session("a", 100.0, 30.0), session("b", 1000.0, 9.0)]
    trials = [(99.0, 1.0), (105.0, 2.0), (110.0, None), (1000.0, 4.0), (1005.0, 8.0)]
    found = with_trials(sessions, trials)
    assert [(entry["trials"], entry["trial_seconds"]) for entry in found] == [(3, 3.0), (2, 12.0)]
    assert with_trials([session(None, None, 50.0)], trials)[0]["trials"] == 5
    assert with_trials([], trials) == []
