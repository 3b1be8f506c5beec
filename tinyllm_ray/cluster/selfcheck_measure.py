"""Measures a cluster before a study does: the A/A floor, the control on every device, bandwidths.

The A/A floor is what equal processes differ by on one device: no difference below it can be seen. The control is the
baseline of the study that would run here, measured by the very trials that a study runs (`cluster.trials`), one process
after the other on all devices at once. The result is a folder or an archive to keep, or to send.
"""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.prefetch import prefetching
from tinyllm_ray.cluster.trials import concurrency, resources, run_trials
from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.errors import NoResultError
from tinyllm_ray.measure.environment import collect_environment
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.device_blocks import Control, DeviceBlocks
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.noise import Spread, device_name, learned_spread, spread_of
from tinyllm_ray.search.space import load_space

LEAST_PROCESSES = 3
"""On each device, for a spread with two degrees of freedom."""
_PROBE_SECONDS = 120.0
_OVER_SLOWEST = 1.5
"""A process is begun while so many times the slowest one so far are left."""
_CLOSING_SECONDS = 10.0


class ControlDriver:
    """Asks for the control again and again; a `cluster.searcher.Driver`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        devices: int,
        processes: int,
        deadline: Deadline,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`devices` run at once, and `processes` are wanted on each; `tell` gets a line for each that has ended."""
        self.lost = 0
        self._tell = tell
        self._heard: dict[str, TrialRecord] = {}
        self._request, self._deadline = request, deadline
        self._devices, self._processes = devices, processes
        self._asked = 0

    @property
    def records(self) -> list[TrialRecord]:
        return list(self._heard.values())

    @property
    def finished(self) -> bool:
        return self._enough() or self._late()

    def ask(self) -> Mapping[str, Any] | None:
        if self.finished:
            return None
        self._asked += 1
        name = f"control-{self._asked}"
        return {**self._request, "candidate": name, "label": name, "limit_seconds": self._deadline.remaining()}

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "record" and candidate not in self._heard:  # Tune repeats it when the trial completes
            record = self._heard[candidate] = TrialRecord.model_validate(event["record"])
            rate = "" if record.targets_per_second is None else f", {record.targets_per_second:,.0f} targets/s"
            on = f" on {device_name(record)}" if record.devices else ""
            self._tell(f"{candidate}{on}: {record.fate.value}{rate}")

    def lose(self, candidate: str) -> None:
        self.lost += 1

    def _enough(self) -> bool:
        """Whether every device has what is wanted, or so many ran that some device will never have it."""
        counts: dict[str, int] = {}
        for record in self.records:
            counts[device_name(record)] = counts.get(device_name(record), 0) + 1
        done = [count for name, count in counts.items() if name and count >= self._processes]
        return len(done) >= self._devices or self._asked >= 2 * self._devices * self._processes

    def _late(self) -> bool:
        slowest = max((record.seconds.total or 0.0 for record in self.records), default=0.0)
        return self._deadline.remaining() <= _OVER_SLOWEST * slowest


@contextmanager
def ended_by_signals(end: Callable[[str], None]) -> Iterator[None]:
    """While entered, the first of SIGINT, SIGTERM and SIGHUP ends the process, after `end` was told its name.

    It ends in the signal's handler: an exception out of one does not come through Ray's compiled code.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def leave(number: int, frame: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # whoever has no patience sends KILL
        try:
            end(signal.Signals(number).name)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(128 + number)

    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(
    folder: Path,
    budget_seconds: float,
    address: str | None,
    processes: int,
    tell: Callable[[str], None] = lambda line: None,
    cut: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measure within the budget and leave everything in `folder`; the figures.

    Raises NoResultError where no process of the control came to its end. A signal ends the process, after `cut` was
    given what there is.
    """
    deadline = Deadline.after(budget_seconds - _CLOSING_SECONDS)
    logs = folder / "logs"
    logs.mkdir(parents=True)
    with connect(address) as connection:
        began = time.monotonic()
        speeds = _bandwidths(connection)
        facts: dict[str, Any] = {"bandwidth_gb_per_second": speeds, "bandwidth_seconds": time.monotonic() - began}
        config, protocol = _control(connection)
        facts |= {"control": config.execution.model_dump(mode="json"), "parameters": config.model.parameters}
        cache = open_cache(default_cache())
        request = control_request(config, protocol, cache, connection.device_kind)
        driver = ControlDriver(request, concurrency(connection), processes, deadline, tell)

        def leave(ended: str | None) -> dict[str, Any]:
            found = summarise(driver.records) | facts | {"lost": driver.lost, "ended_early": ended}
            _write(folder, driver.records, found)
            return found

        storage = Path(tempfile.mkdtemp(prefix="selfcheck-"))
        try:
            with prefetching("selfcheck") as servers, ended_by_signals(lambda name: cut(leave(name))):
                ended = run_trials(driver, connection, logs, storage, servers)
        finally:
            shutil.rmtree(storage, ignore_errors=True)
    found = leave(ended)
    if not found["devices"]:
        reasons = {record.reason for record in driver.records}
        raise NoResultError(f"no process of the control was measured: {'; '.join(map(str, reasons)) or 'too late'}")
    return found


def _write(folder: Path, records: Sequence[TrialRecord], found: Mapping[str, Any]) -> None:
    with (folder / "trials.jsonl").open("w") as file:
        file.writelines(f"{record.model_dump_json()}\n" for record in records)
    for name, values in (("measured", found), ("environment", collect_environment())):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def control_request(config: Config, protocol: Protocol, cache: TokenCache, device_kind: str) -> dict[str, Any]:
    """What every process of the control is asked."""
    return {
        "study": "selfcheck",
        "config": config.model_dump(mode="json"),
        "protocol": protocol.model_dump(mode="json"),
        "cache": str(cache.folder),
        "cache_identity": cache.identity,
        "configuration": None,
        "device_kind": device_kind,
        "purpose": "control",
    }


def summarise(records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The A/A floor and every device's speed, from the complete records among these.

    The floor is this machine's alone: a study starts from what other machines showed, and learns.
    """
    complete = [record for record in records if record.fate == Fate.COMPLETE and record.targets_per_second]
    groups: dict[str, list[float]] = {}
    for record in complete:
        groups.setdefault(device_name(record), []).append(record.targets_per_second or 0.0)
    controls = [Control(device_name(record), record.timestamp, record.targets_per_second or 0.0) for record in complete]
    own = learned_spread(groups.values(), Spread(0.0, 0.0)) if max(map(len, groups.values()), default=0) > 1 else None
    blocks = DeviceBlocks(controls, spread_of(complete))
    names = {device_name(record): record.devices[0] for record in complete}
    return {
        "processes": len(complete),
        "not_complete": [
            f"{record.candidate}: {record.fate.value}: {record.reason}" for record in records if record not in complete
        ],
        "floor": own.value if own else None,
        "floor_degrees": own.degrees if own else 0,
        "devices": [
            {
                "device": speed.device,
                "name": names[speed.device].name,
                "host": names[speed.device].host,
                "targets_per_second": statistics.median(groups[speed.device]),
                "processes": groups[speed.device],
                "deviation": _deviation(groups[speed.device]),
                "ratio_to_fastest": speed.ratio,
                "ratio_interval": [speed.low, speed.high],
                "slow": speed.slow,
            }
            for speed in blocks.speeds()
        ],
    }


def archive(folder: Path, target: Path) -> None:
    """Pack the folder into a `.tar.gz` and remove it."""
    with tarfile.open(target, "w:gz") as file:
        file.add(folder, arcname=target.name.removesuffix(".tar.gz"))
    shutil.rmtree(folder)


def _control(connection: Connection) -> tuple[Config, Protocol]:
    """The baseline of the study that runs here where nothing is named."""
    on_gpu = connection.device_kind == "cuda"
    config, space = load("20m" if on_gpu else "nano"), load_space("execution" if on_gpu else "smoke")
    fitted = fit_space(space, config, connection.device_kind, int(resources(connection)["CPU"]))
    return config.with_execution(fitted.baseline), fitted.protocol


def _deviation(rates: Sequence[float]) -> float | None:
    """Standard deviation of log throughput among a device's processes; None of one alone."""
    return statistics.stdev(map(math.log, rates)) if len(rates) > 1 else None


class _Prober:
    """Holds a trial's share of a node, so that each has a device of its own."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def measure(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "tinyllm_ray.measure.bandwidth"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
            found: dict[str, Any] = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError) as error:
            return {"problem": f"{type(error).__name__}: no bandwidths"}
        environment = collect_environment()
        return found | {"host_name": environment["hostname"], "gpu": environment["cuda_visible_devices"]}


def _bandwidths(connection: Connection) -> list[dict[str, Any]]:
    """Of every device; those of one node one after the other, as they share its memory."""
    share = resources(connection)
    prober = ray.remote(num_cpus=share["CPU"], num_gpus=share.get("GPU", 0))(_Prober)
    probers = [prober.remote() for _ in range(concurrency(connection))]
    try:
        nodes: dict[str, list[Any]] = {}
        for actor, node in zip(probers, ray.get([actor.where.remote() for actor in probers]), strict=True):
            nodes.setdefault(node, []).append(actor)
        found = []
        for turn in range(max(map(len, nodes.values()), default=0)):
            now = [actors[turn] for actors in nodes.values() if turn < len(actors)]
            found += ray.get([actor.measure.remote() for actor in now])
        return found
    finally:
        for actor in probers:
            ray.kill(actor)
