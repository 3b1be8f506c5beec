"""From a submission's command line and a site's settings to the script and its submission."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tinyllm_ray.clock import parse_duration
from tinyllm_ray.cluster.launch import program
from tinyllm_ray.cluster.returns import is_study, option_value
from tinyllm_ray.cluster.script import Request, check_duration, render
from tinyllm_ray.cluster.site import Site, load_site, shipped_files
from tinyllm_ray.errors import ConfigError

SCRIPT = "ray_cluster.sbatch"
_FROM_SITE = ("account", "partition", "constraint", "time", "gpus_per_node", "cpus_per_node", "memory_per_node")
_SBATCH_NAMES = {"cpus_per_node": "cpus-per-task", "memory_per_node": "mem", "gpus_per_node": "gpus-per-node"}
"""A node has one task of Slurm's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `submit`."""
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument("--gpus-per-node", type=int, metavar="N")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help="Slurm gives one where nobody asks")
    parser.add_argument("--memory-per-node", metavar="SIZE", help="like 400G; 0 is all of a node's")
    parser.add_argument("--time", metavar="LIMIT", help="the job's limit as Slurm has it: 1:00:00 is an hour")
    for name in ("account", "partition", "constraint"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--site", metavar="FILE", help="settings of a site in YAML, or a shipped one: gh200")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="as in --sbatch=--exclusive")
    parser.add_argument("--requeue", action="store_true", help="come back after preemption and at the job's limit")
    parser.add_argument("--min-nodes", type=int, metavar="N", help="begin with this many when others do not come up")
    parser.add_argument("--start-deadline", metavar="DURATION", help="for all nodes to be there (default: 5m)")
    parser.add_argument("--stage", action="store_true", help="copy packages, tokens and compiled code to every node")
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="like -- tune --budget 45m")


def script_of(options: argparse.Namespace) -> str:
    """The script to submit. Raises ConfigError for what cannot be submitted as it is meant."""
    site = load_site(options.site) if options.site else Site()
    file = shipped_files().get(SCRIPT)
    if file is None:
        raise ConfigError(f"{SCRIPT} is not beside the package; install tinyllm_ray again")
    return render(file.read_text(encoding="utf-8"), request_of(options, site))


def request_of(options: argparse.Namespace, site: Site) -> Request:
    """A submission: what the command line says, else the site's."""
    _check_command(options.words)
    settled = {name: _settle(options, site, name) for name in _FROM_SITE}
    _check(options, settled)
    named = {"nodes": options.nodes, **settled}
    return Request(
        command=options.words[1:] if options.words[0] == "--" else options.words,
        options={
            _SBATCH_NAMES.get(name, name): str(value)
            for name, value in named.items()
            if value is not None and value != 0
        },
        further=(*site.sbatch, *(["--requeue"] if options.requeue else []), *options.sbatch),
        setup=site.setup,
        modules=site.modules,
        python=site.python or sys.executable,
        launch=_launch_options(options, site),
    )


def _check_command(words: Sequence[str]) -> None:
    """A mistake in the command is for now, not for after the queue."""
    program(words)
    words = words[1:] if words[0] == "--" else words
    if is_study(words):
        budget = option_value(words, "--budget")
        if budget is None:
            raise ConfigError("tune: a study needs a budget; give it one, like -- tune --budget 45m")
        parse_duration(budget, "--budget")
    if words[0].endswith(".py") and not Path(words[0]).is_file():
        raise ConfigError(f"{words[0]!r}: there is no such file here, where the job begins; name one that is")


def _settle(options: argparse.Namespace, site: Site, name: str) -> str | int | None:
    given: str | int | None = getattr(options, name)
    found: str | int | None = getattr(site, name)
    return found if given is None else given


def _check(options: argparse.Namespace, settled: dict[str, str | int | None]) -> None:
    least = {"nodes": (options.nodes, 1), "gpus_per_node": (settled["gpus_per_node"], 0)}
    least["cpus_per_node"] = (settled["cpus_per_node"], 1)
    for name, (value, minimum) in least.items():
        if isinstance(value, int) and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not allowed; give {minimum} or more")
    if options.min_nodes is not None and not 1 <= options.min_nodes <= options.nodes:
        raise ConfigError(
            f"--min-nodes: {options.min_nodes} is not allowed; give 1 to {options.nodes}, as --nodes has it"
        )
    if options.start_deadline is not None:
        parse_duration(options.start_deadline, "--start-deadline")
    if isinstance(settled["time"], str):
        try:
            check_duration(settled["time"])
        except ValueError as error:
            raise ConfigError(f"--time: {error}") from None


def _launch_options(options: argparse.Namespace, site: Site) -> list[str]:
    said = {
        "min-nodes": options.min_nodes,
        "start-deadline": options.start_deadline,
        "interface": site.interface,
        "scratch": site.scratch and str(Path(site.scratch)),
        "container": site.container,
        "packs": site.packs if options.stage else None,
        "login": site.login,
    }
    given = [f"--{name}={value}" for name, value in said.items() if value is not None]
    return [*given, *(["--stage"] if options.stage else [])]
