"""The journal survives a crash at any byte."""

import errno
import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray import journal
from tinyllm_ray.errors import TinyllmRayError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), min_size=1, max_size=6)


def write(path: Path, entries: list[dict[str, Any]]) -> bytes:
    path.unlink(missing_ok=True)
    for entry in entries:
        journal.append_line(path, entry)
    return path.read_bytes()


@given(entries=ENTRIES, data=st.data())
def test_every_crash_keeps_the_whole_lines_and_the_file_goes_on(
    tmp_path_factory: pytest.TempPathFactory, entries: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "crash.jsonl"
    content = write(path, entries)
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = entries[: content[:cut].count(b"\n")]
    assert journal.read_lines(path) == whole

    more = data.draw(ENTRIES)
    journal.append_line(path, more[0])
    journal.append_lines(path, more[1:])
    assert journal.read_lines(path) == whole + more
    assert path.read_bytes().count(b"\n") == len(whole + more)


def test_what_cannot_be_read_is_said_and_what_is_not_there_holds_none(tmp_path: Path) -> None:
    assert journal.read_lines(tmp_path / "absent") == []
    with pytest.raises(TinyllmRayError, match="cannot be read: Is a directory"):
        journal.read_lines(tmp_path)


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 200_000])
def test_a_torn_line_of_any_length_is_removed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "records"
    journal.append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b"x" * length)
    assert journal.read_lines(path) == [{"a": 1}]
    journal.append_line(path, {"a": 2})
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_file_of_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(b'{"a": ')
    assert journal.read_lines(path) == []
    journal.append_line(path, {"a": 1})
    assert path.read_bytes() == b'{"a":1}\n'


def test_no_file_holds_no_records(tmp_path: Path) -> None:
    assert journal.read_lines(tmp_path / "absent") == []


@pytest.mark.parametrize("damage", [b"x", b"", b'{"a":', b"\xff\xfe", b"[1]", b"null", b"3"])
def test_a_damaged_line_before_the_end_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "records"
    path.write_bytes(b'{"a":1}\n' + damage + b'\n{"a":3}\n')
    with pytest.raises(TinyllmRayError, match=r"records: line 2 "):
        journal.read_lines(path)


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, figure: float) -> None:
    path = tmp_path / "records"
    journal.append_line(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        journal.append_lines(path, [{"a": 2}, {"loss": figure}])
    assert journal.read_lines(path) == [{"a": 1}]


def test_appending_returns_with_the_record_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records"
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal.append_line(path, {"a": 1})
    assert synced == [b'{"a":1}\n']


def test_readers_beside_a_writer_see_whole_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records"
    process = multiprocessing.get_context("spawn").Process(target=_write_many, args=(path, 300))
    process.start()
    seen = 0
    while process.is_alive() or seen < 300:
        numbers = [entry["number"] for entry in journal.read_lines(path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= seen
        seen = len(numbers)
        assert process.is_alive() or process.exitcode == 0
    process.join()


def _write_many(path: Path, count: int) -> None:
    for number in range(count):
        journal.append_line(path, {"number": number, "text": "x" * (number * 37 % 9000)})


def test_a_replaced_file_is_old_or_new_and_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    contents = {name: json.dumps({"name": name, "text": name * 500_000}).encode() for name in "ab"}
    journal.write_atomically(path, contents["a"])

    def replace() -> None:
        for turn in range(10):
            journal.write_atomically(path, contents["ba"[turn % 2]])

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(replace) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            assert path.read_bytes() in contents.values()
        assert [writer.result() for writer in writers] == [None, None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    journal.write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        journal.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_of_several_that_write_a_file_first_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "study.yaml"
    journal.write_first(path, b"one")
    with pytest.raises(FileExistsError):
        journal.write_first(path, b"other")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_appears_while_a_file_is_written_first_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synchronize = tmp_path / "study.yaml", os.fsync

    def slowly(descriptor: int) -> None:
        synchronize(descriptor)
        path.write_bytes(b"one")

    monkeypatch.setattr(os, "fsync", slowly)
    with pytest.raises(FileExistsError):
        journal.write_first(path, b"other")
    assert path.read_bytes() == b"one"
