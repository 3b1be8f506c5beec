"""The control on every device: how often it is asked for, what its records come to, what the bundle holds."""

import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fakes import FakeClock

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.selfcheck_command import lines
from tinyllm_ray.cluster.selfcheck_measure import ControlDriver, archive, summarise
from tinyllm_ray.measure.bandwidth import bandwidths
from tinyllm_ray.records import Device, Fate, Seconds, TrialRecord


def record(candidate: str, device: str, rate: float | None, seconds: float = 10.0, at: float = 0.0) -> TrialRecord:
    return TrialRecord(
        study="selfcheck",
        candidate=candidate,
        kind="measurement",
        purpose="control",
        fate=Fate.COMPLETE if rate else Fate.FAILED,
        reason=None if rate else "it broke",
        recipe_identity="r",
        execution_identity="e",
        cache_identity="c",
        source_identity="s",
        source_dirty=None,
        execution={},
        devices=[Device(kind="cuda", name="GH200", identifier=device, host="gh1")] if rate else [],
        seconds=Seconds(total=seconds),
        targets_per_second=rate,
        timestamp=at,
    )


class Ray:
    """Runs the driver's requests on devices in turn, each taking some seconds of the clock."""

    def __init__(self, driver: ControlDriver, clock: FakeClock, seconds: float = 10.0) -> None:
        self.driver, self.clock, self.seconds = driver, clock, seconds
        self.limits: list[float] = []

    def run(self, devices: list[str], rate: float | None = 1000.0) -> int:
        """Asks until nothing comes; how many ran."""
        ran = 0
        while (request := self.driver.ask()) is not None:
            self.limits.append(request["limit_seconds"])
            self.clock.advance(self.seconds / len(devices))
            found = record(request["candidate"], devices[ran % len(devices)], rate, self.seconds)
            event = {"event": "record", "record": found.model_dump(mode="json")}
            self.driver.hear(request["candidate"], event)
            self.driver.hear(request["candidate"], event)  # as Tune does
            ran += 1
        return ran


def driver(clock: FakeClock, devices: int = 2, processes: int = 3, seconds: float = 1000.0) -> ControlDriver:
    return ControlDriver({"study": "selfcheck"}, devices, processes, Deadline.after(seconds, clock))


def test_every_device_gets_its_processes() -> None:
    clock = FakeClock()
    made = driver(clock)
    assert Ray(made, clock).run(["a", "b"]) == 6
    assert made.finished
    assert len(made.records) == 6


def test_each_process_is_told_of_once() -> None:
    clock, said = FakeClock(), []
    made = ControlDriver({"study": "selfcheck"}, 1, 3, Deadline.after(1000.0, clock), said.append)
    Ray(made, clock).run(["a"])
    assert said == [f"control-{number} on a: complete, 1,000 targets/s" for number in (1, 2, 3)]


@pytest.mark.parametrize("fault", ["", "; 1 / 0"])
def test_the_first_signal_has_it_leave_what_there_is_and_the_next_ones_wait(fault: str) -> None:
    program = (
        "import os, signal\n"
        "from tinyllm_ray.cluster.selfcheck_measure import ended_by_signals\n"
        "def end(name):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"    print(name, flush=True){fault}\n"
        "with ended_by_signals(end):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGHUP, "SIGHUP\n"), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == bool(fault)


def test_a_device_that_gets_none_does_not_keep_it_going_for_ever() -> None:
    clock = FakeClock()
    assert Ray(driver(clock), clock).run(["a"]) == 12


def test_a_process_that_would_not_end_in_time_is_not_begun() -> None:
    clock = FakeClock()
    made = driver(clock, devices=1, processes=100, seconds=100.0)
    machine = Ray(made, clock)
    assert machine.run(["a"]) == 9  # with 10 s left the tenth would take all of it
    assert clock.now <= 1100.0
    assert machine.limits[0] == pytest.approx(100.0)
    assert machine.limits[-1] == pytest.approx(20.0)


def test_failing_processes_come_to_an_end() -> None:
    clock = FakeClock()
    made = driver(clock)
    assert Ray(made, clock).run(["a", "b"], rate=None) == 12
    found = summarise(made.records)
    assert found["devices"] == []
    assert found["floor"] is None
    assert found["not_complete"][0] == "control-1: failed: it broke"


def test_the_floor_is_what_equal_processes_differ_by_and_devices_are_ranked() -> None:
    rates = {"a": [1000.0, 1010.0, 1000.0], "b": [900.0, 909.0, 900.0]}
    records = [record(f"{d}{i}", d, rate, at=float(i)) for d, all_of in rates.items() for i, rate in enumerate(all_of)]
    found = summarise(records)
    # Half the mean square of successive differences, each log(1.01).
    assert found["floor"] == pytest.approx(math.log(1.01) / math.sqrt(2))
    assert found["floor_degrees"] == 4
    fast, slow = found["devices"]
    assert (fast["device"], slow["device"]) == ("a", "b")
    assert slow["ratio_to_fastest"] == pytest.approx(0.9, rel=1e-3)
    assert slow["slow"]
    assert not fast["slow"]
    assert slow["targets_per_second"] == 900.0


def test_one_process_a_device_leaves_the_floor_unknown() -> None:
    found = summarise([record("a", "a", 1000.0), record("b", "b", 1000.0)])
    assert found["floor"] is None
    speeds = [{"host": 13.5, "to_device": None, "host_name": "gh1"}]
    said = lines(found | {"bandwidth_gb_per_second": speeds, "ended_early": "SIGTERM"})
    assert "not known" in said[0]
    assert "ended early: SIGTERM" in said
    assert "bandwidth on gh1: host 13.5 GB/s" in said


def test_bandwidths_count_what_is_moved() -> None:
    ticks = iter(range(1000))
    found = bandwidths(size=10**6, clock=lambda: float(next(ticks)))
    assert found["host"] == pytest.approx(2e-3)  # two MB in one second
    assert set(found) == {"host", "to_device", "from_device", "device"}


def test_an_archive_holds_the_folder_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "checks.json").write_text("{}")
    archive(tmp_path / "f", tmp_path / "mine.tar.gz")
    with tarfile.open(tmp_path / "mine.tar.gz") as file:
        assert file.getnames() == ["mine", "mine/checks.json"]
    assert not (tmp_path / "f").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_this_machine_is_measured_and_the_bundle_holds_it_all(built_root: Path, tmp_path: Path) -> None:
    """The budget is one that a busy machine keeps; it ends with the third process."""
    command = [sys.executable, "-m", "tinyllm_ray.cluster", "selfcheck", "--measure", "--processes", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["TINYLLM_RAY_CACHE"] = str(built_root)
    done = subprocess.run(
        [*command, "--bundle", str(tmp_path / "b")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "b" / "measured.json").read_text())
    assert measured["processes"] == 3
    assert measured["floor"] > 0
    assert measured["bandwidth_gb_per_second"][0]["host"] > 0
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        *("checks.json", "environment.json", "measured.json", "trials.jsonl", "logs"),
    }
    records = [json.loads(line) for line in (tmp_path / "b" / "trials.jsonl").read_text().splitlines()]
    assert [(record["purpose"], record["fate"]) for record in records] == [("control", "complete")] * 3
