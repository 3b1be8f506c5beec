"""Signals at the moments a run has: imports and compilation, updates, evaluation, code that stays inside C."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tinyllm_ray.train.interruption import SIGNALS, Interrupted, Interruption

_PRELUDE = """
import os, pathlib, signal, sys, time
from tinyllm_ray.train.interruption import Interrupted, Interruption

def leave(number):
    pathlib.Path(sys.argv[1]).write_text(f"left {number}")

def ready():
    print("ready", flush=True)

"""


def start(body: str, left: Path) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(body), str(left)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program


def status_of(number: int) -> int:
    return 130 if number == signal.SIGINT else 143


@pytest.fixture
def left(tmp_path: Path) -> Path:
    return tmp_path / "left"


AT_ONCE = """
    with Interruption(leave):
        ready()
        while True:
            pass
"""
ORDERLY = """
    with Interruption(leave) as interruption, interruption.orderly():
        ready()
        while not interruption.number:
            time.sleep(0.01)
        print("in order", flush=True)
    sys.exit(interruption.exit_status)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_first_update_a_signal_ends_the_process_at_once(number: int, left: Path) -> None:
    program = start(AT_ONCE, left)
    program.send_signal(number)
    _, errors = program.communicate(timeout=240)
    assert program.returncode == status_of(number)
    assert left.read_text() == f"left {number}"
    assert errors == f"ended by {signal.Signals(number).name}\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_in_order_the_run_decides(number: int, left: Path) -> None:
    program = start(ORDERLY, left)
    program.send_signal(number)
    output, errors = program.communicate(timeout=240)
    assert program.returncode == status_of(number)
    assert output == "in order\n"
    assert "once more ends at once" in errors
    assert not left.exists()


def test_a_second_signal_ends_it_wherever_it_is(left: Path) -> None:
    program = start(
        """
        with Interruption(leave) as interruption, interruption.orderly():
            ready()
            while not interruption.number:
                time.sleep(0.01)
            print("heard", flush=True)
            while True:
                time.sleep(1)
        """,
        left,
    )
    program.send_signal(signal.SIGTERM)
    assert program.stdout is not None
    assert program.stdout.readline() == "heard\n"
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=240)
    assert program.returncode == 143  # the first one's: it is what asked for the end
    assert not left.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="sem_wait of the C library")
def test_code_that_does_not_return_to_the_interpreter_is_ended_too(left: Path) -> None:
    """As a backward pass that compiles does: its Python handler would run hours later."""
    program = start(
        """
        import ctypes
        with Interruption(leave):
            ready()
            libc, zero = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            while True:
                libc.sem_wait(zero)
        """,
        left,
    )
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=240)
    assert program.returncode == 143
    assert left.read_text() == "left 15"


def test_where_evaluation_runs_it_raises_in_the_main_thread(left: Path) -> None:
    program = start(
        """
        with Interruption(leave) as interruption, interruption.orderly():
            try:
                with interruption.raising():
                    ready()
                    while True:
                        pass
            except Interrupted:
                print("saving", interruption.number, flush=True)
        """,
        left,
    )
    program.send_signal(signal.SIGUSR1)
    output, _ = program.communicate(timeout=240)
    assert output == f"saving {int(signal.SIGUSR1)}\n"
    assert program.returncode == 0
    assert not left.exists()


def test_an_evaluation_after_the_signal_does_not_begin() -> None:
    interruption = Interruption()
    interruption.number = signal.SIGTERM
    with pytest.raises(Interrupted), interruption.raising():
        pytest.fail("entered")


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    threads = threading.active_count()
    with Interruption():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_on_another_thread_it_hears_nothing_and_harms_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter() -> None:
        with Interruption() as interruption, interruption.orderly(), interruption.raising():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_imports_nothing_heavy() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys, tinyllm_ray.train.interruption; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "numpy", "pydantic", "yaml"} & set(found)
