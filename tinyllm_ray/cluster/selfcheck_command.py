"""`cluster selfcheck`: its options, its lines, its exit status.

What takes time to import is imported where it is needed, as the other actions answer at once.
"""

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm_ray.allocation import seconds_within_allocation
from tinyllm_ray.clock import parse_duration
from tinyllm_ray.command import say
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError

if TYPE_CHECKING:
    from tinyllm_ray.cluster.selfcheck import Check

EPILOG = """examples:
  python -m tinyllm_ray.cluster selfcheck
  python -m tinyllm_ray.cluster selfcheck --out /project/studies --json
  srun --nodes=4 --ntasks-per-node=1 --label python -m tinyllm_ray.cluster selfcheck
  python -m tinyllm_ray.cluster selfcheck --measure --budget 20m --bundle selfcheck.tar.gz
  python -m tinyllm_ray.cluster submit --nodes 4 --gpus-per-node 4 --time 30 -- selfcheck --measure

Each line is a check: ok; warn, a study runs and its figures may suffer; fail, it would not run as asked. With --measure
the control (the baseline of the study that would run here) is measured in equal processes on every device: what they
differ by is the least difference that a study can see. The bundle holds the checks, records, bandwidths and versions.

Tested by faked answers only, and not yet seen on such a machine: GH200's pages of 64 KB, its NUMA layout, host memory
bound to CPU nodes, and every remedy for a driver.

exit status: 0 nothing fails; 1 a fault of the program; 2 a mistake in the request; 3 a check fails, or nothing could be
measured; 128 and its number where a signal ended it: the bundle has what was measured by then
"""


_BUDGET, _PROCESSES = "20m", 6


def add_selfcheck(parser: argparse.ArgumentParser) -> None:
    """Options of `selfcheck`."""
    parser.epilog = EPILOG
    parser.add_argument("--out", default=".", metavar="DIR", help="where studies would go (default: here)")
    parser.add_argument("--scratch", default="/tmp", metavar="DIR", help="as in the site's settings")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--measure", action="store_true", help="measure as well")
    measuring = parser.add_argument_group("with --measure")
    measuring.add_argument("--budget", metavar="DURATION", help=f"for measuring (default: {_BUDGET})")
    measuring.add_argument(
        "--processes", type=int, metavar="N", help=f"of the control a device (default: {_PROCESSES})"
    )
    measuring.add_argument("--address", metavar="HOST:PORT", help="measure on this Ray cluster (default: RAY_ADDRESS)")
    measuring.add_argument(
        "--bundle", metavar="PATH", help="a folder, or a file .tar.gz (default: selfcheck-HOST.tar.gz)"
    )


def selfcheck(options: argparse.Namespace) -> int:
    """Check, measure where asked, say it; returns the exit status. Raises ConfigError for a mistake in the options."""
    from tinyllm_ray.cluster.selfcheck import worst

    seconds = seconds_within_allocation(parse_duration(options.budget or _BUDGET, "--budget"), os.environ)
    target = _target(options)
    checks = check(options)
    if not options.json:
        for line in checks:
            say(str(line))
        say(_total(checks))
    found: dict[str, Any] = {"checks": [asdict(line) for line in checks], "state": worst(checks)}
    if target is not None and worst(checks) != "fail":
        found |= _measure(options, seconds, target, found)
    elif target is not None and not options.json:
        say("nothing is measured where a check fails")
    if options.json:
        say(json.dumps(found))
    return EXIT_NO_RESULT if worst(checks) == "fail" else EXIT_DONE


def check(options: argparse.Namespace) -> "list[Check]":
    """All checks of this machine, the most decisive first."""
    from tinyllm_ray.cluster.selfcheck import check_host
    from tinyllm_ray.cluster.selfcheck_facts import gather
    from tinyllm_ray.cluster.selfcheck_gpu import check_gpus
    from tinyllm_ray.data.prepare import cache_root
    from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE

    compiled = os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()
    places = {"out": options.out, "tokens": cache_root(), "compiled": compiled, "scratch": options.scratch}
    facts = gather(places | ({"shared memory": "/dev/shm"} if Path("/dev/shm").is_dir() else {}))
    return [*check_gpus(facts), *check_host(facts)]


def _target(options: argparse.Namespace) -> Path | None:
    """Where the bundle goes; None without --measure. Raises ConfigError where it cannot go there."""
    if not options.measure:
        for name in ("budget", "processes", "address", "bundle"):
            if (value := getattr(options, name)) is not None:
                raise ConfigError(f"--{name} {value}: nothing is measured; add --measure, or leave --{name} out")
        return None
    from tinyllm_ray.cluster.selfcheck_measure import LEAST_PROCESSES

    if options.processes is None:
        options.processes = _PROCESSES
    if options.processes < LEAST_PROCESSES:
        raise ConfigError(f"--processes: {options.processes} is not allowed; give {LEAST_PROCESSES} or more")
    path = Path(options.bundle or f"selfcheck-{socket.gethostname()}.tar.gz").absolute()
    if path.exists():
        raise ConfigError(f"--bundle: {path} is there already; remove it, or name another")
    if not path.parent.is_dir():
        raise ConfigError(f"--bundle: {path.parent} is no folder; make it, or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--bundle: {path.parent} cannot be written; name another with --bundle")
    return path


def _measure(options: argparse.Namespace, seconds: float, target: Path, found: dict[str, Any]) -> dict[str, Any]:
    from tinyllm_ray.cluster.selfcheck_measure import archive, measure

    packed = target.name.endswith(".tar.gz")
    folder = Path(tempfile.mkdtemp(prefix=".selfcheck-", dir=target.parent)) if packed else target
    folder.mkdir(exist_ok=True)
    (folder / "checks.json").write_text(json.dumps(found, indent=1) + "\n")
    address = options.address or os.environ.get("RAY_ADDRESS") or None

    def close() -> None:
        if packed and folder.is_dir():
            archive(folder, target)  # what there is, also where it ends early

    def tell(line: str) -> None:
        if not options.json:
            say(line)

    def cut(measured: dict[str, Any]) -> None:
        close()
        _tell_all(measured, target, tell)

    try:
        measured = measure(folder, seconds, address, options.processes, tell, cut)
    finally:
        close()
    _tell_all(measured, target, tell)
    return {"measured": measured, "bundle": str(target)}


def _tell_all(measured: dict[str, Any], target: Path, tell: Callable[[str], None]) -> None:
    for line in [*lines(measured), f"bundle: {target}"]:
        tell(line)


def lines(measured: dict[str, Any]) -> list[str]:
    """The figures for people."""
    floor = measured["floor"]
    words = "not known, as no device ran two of them" if floor is None else f"{floor:.2%} (standard deviation)"
    said = [f"A/A floor, by which equal processes differ: {words}"]
    for device in measured["devices"]:
        rates, deviation = device["processes"], device["deviation"]
        own = "" if deviation is None else f", spread {deviation:.2%}"
        mark = "; slower than noise explains" if device["slow"] else ""
        said.append(
            f"{device['name']} ({device['device']}): {device['targets_per_second']:,.0f} targets/s by the control, "
            f"{len(rates)} processes{own}, {device['ratio_to_fastest']:.1%} of the fastest{mark}"
        )
    for speeds in measured["bandwidth_gb_per_second"]:
        known = ", ".join(
            f"{name} {speeds[name]:.1f}" for name in ("host", "to_device", "from_device", "device") if speeds.get(name)
        )
        said.append(f"bandwidth on {speeds.get('host_name', 'a node')}: {known or speeds.get('problem')} GB/s")
    if measured["ended_early"]:
        said.append(f"ended early: {measured['ended_early']}")
    return said + [f"not measured: {line}" for line in measured["not_complete"]]


def _total(checks: "Sequence[Check]") -> str:
    counts = [f"{sum(line.state == state for line in checks)} {state}" for state in ("ok", "warn", "fail")]
    return ", ".join(counts)
