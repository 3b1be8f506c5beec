"""One build whoever comes first, and never a half-built folder."""

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from tinyllm_ray.data.build_once import build_once

BUILDER = """
import os, pathlib, sys
from tinyllm_ray.data.build_once import build_once

target = pathlib.Path(sys.argv[1])

def build(folder):
    (folder / "part").write_text("half")
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "done").write_text(str(os.getpid()))

build_once(target, build, lambda folder: (folder / "done").exists(), waiting=lambda: print("waiting", flush=True))
print("ready", flush=True)
"""


@pytest.fixture
def start_builder(tmp_path, child_environment):
    builders = []

    def start():
        builder = subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(tmp_path / "target")],
            env=child_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        builders.append(builder)
        return builder

    yield start
    for builder in builders:
        builder.kill()
        builder.communicate()


def build(folder):
    (folder / "done").write_text("here")


def ready(folder):
    return (folder / "done").exists()


def names(folder):
    """What is there beside the lock."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def test_one_builds_and_the_others_wait(start_builder, tmp_path):
    first = start_builder()
    assert first.stdout.readline() == "building\n"
    others = [start_builder(), start_builder()]
    assert [other.stdout.readline() for other in others] == ["waiting\n"] * 2
    assert not (tmp_path / "target").exists()
    said, _ = first.communicate("\n")
    assert said == "ready\n"
    assert [other.communicate()[0] for other in others] == ["ready\n"] * 2
    assert (tmp_path / "target" / "done").read_text() == str(first.pid)
    assert names(tmp_path) == ["target"]


def test_a_killed_builder_leaves_nothing_that_is_used(start_builder, tmp_path):
    builder = start_builder()
    assert builder.stdout.readline() == "building\n"
    (half,) = names(tmp_path)
    builder.kill()
    builder.wait()
    assert names(tmp_path) == [half]
    build_once(tmp_path / "target", build, ready)
    assert names(tmp_path) == ["target"]
    assert not (tmp_path / "target" / "part").exists()


def test_what_is_ready_is_left_alone(tmp_path):
    build_once(tmp_path / "target", build, ready)
    build_once(tmp_path / "target", lambda folder: pytest.fail("built again"), ready)


def test_a_damaged_target_is_replaced(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "rest").write_text("")
    build_once(tmp_path / "target", build, ready)
    assert names(tmp_path) == ["target"]
    assert names(tmp_path / "target") == ["done"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "part").write_text("half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        build_once(tmp_path / "target", fail, ready)
    assert names(tmp_path) == []


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    def overtaken(folder):
        build(folder)
        build_once(tmp_path / "target", lambda other: (other / "done").write_text("first"), ready)

    build_once(tmp_path / "target", overtaken, ready)
    assert (tmp_path / "target" / "done").read_text() == "first"
    assert names(tmp_path) == ["target"]


def test_waiting_ends_when_the_lock_is_free_or_the_time_is_over(tmp_path):
    held = (tmp_path / ".target.lock").open("ab")
    fcntl.flock(held, fcntl.LOCK_EX)
    build_once(tmp_path / "target", build, ready, wait_seconds=0)
    assert names(tmp_path) == ["target"]
    (tmp_path / "target" / "done").unlink()
    build_once(tmp_path / "target", build, ready, waiting=held.close)
    assert ready(tmp_path / "target")


def test_leftovers_of_the_dead_alone_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    kept = [f".target.building-{host}-{os.getppid()}-aa", ".target.building-elsewhere-1-bb", ".other.building-x-1-cc"]
    gone = [f".target.building-{host}-{pid}-dd" for pid in (dead.pid, os.getpid())] + [
        ".target.building-elsewhere-1-ee"
    ]
    for name in kept + gone:
        (tmp_path / name).mkdir()
    yesterday = time.time() - 86_400
    os.utime(tmp_path / gone[-1], (yesterday, yesterday))
    build_once(tmp_path / "target", build, ready)
    assert names(tmp_path) == sorted([*kept, "target"])
