"""What runs inside a Slurm job: starts Ray on its nodes, a command of the package on top, and ends both.

    python -m tinyllm_ray.cluster.launch tune --budget 45m --out studies/20m

The nodes' steps read from this process and end with it, so that none outlives it however it ends. Standard library
only: Ray and torch are for the processes that need them.
"""

import argparse
import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Deadline, parse_duration, parse_slurm_time
from tinyllm_ray.cluster.descendants import adopt_orphans
from tinyllm_ray.cluster.driver import GRACE_SECONDS, driver_environment, run
from tinyllm_ray.cluster.hand_back import HandBack
from tinyllm_ray.cluster.jobs import RECORD, ask_patiently, log_folder, own_name
from tinyllm_ray.cluster.node import Node
from tinyllm_ray.cluster.nodes import Share, job_field, parse_shares
from tinyllm_ray.cluster.numa_memory import bind_host_memory
from tinyllm_ray.cluster.returns import (
    continued,
    has_to_return,
    is_study,
    may_return,
    requeue,
    runs_before,
    settled_status,
    study_folder,
)
from tinyllm_ray.cluster.stage_job import Staging
from tinyllm_ray.cluster.steps import Steps, describe
from tinyllm_ray.command import Parser, exit_status, note
from tinyllm_ray.errors import ConfigError, NoResultError

Ask = Callable[..., str]
"""Asks one of Slurm's commands, as `jobs.ask_slurm` does."""
PROGRAMS = ("tune", "train", "data")
_COMMANDS = f"{', '.join(PROGRAMS)}, selfcheck or"
START_DEADLINE = "5m"
STEP_END_SECONDS = 15.0
STAGED_END_SECONDS = 60.0
"""With staged files to remove: 50,000 of them took 41 s on a disk that eight others kept busy."""
HANDED_BACK = "handed_back"
"""The file in the job's log folder that names nodes without further use."""
_TICK_SECONDS = 0.2


class Ended(BaseException):
    """A signal asked the launcher to end before the command ran."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: the command's own, else why it did not run."""
    options = build_parser().parse_args(arguments)
    received: list[int] = []
    for number in GRACE_SECONDS:
        signal.signal(number, lambda number, frame: received.append(number))
    adopt_orphans()
    bind_host_memory()  # for the command, which inherits it
    try:
        return exit_status(lambda: launch(options, received))
    except Ended:
        note(f"cluster: ended by {signal.Signals(received[0]).name} before the command ran", sys.stderr)
        return 128 + received[0]


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        "python -m tinyllm_ray.cluster.launch",
        "Start Ray on the nodes of this Slurm job, and run a command of tinyllm_ray on it.",
        "example, in a job's script:\n  python -m tinyllm_ray.cluster.launch tune --budget 45m --out studies/20m",
    )
    parser.add_argument("--min-nodes", type=int, metavar="N", help="go on with this many (default: all)")
    parser.add_argument(
        "--start-deadline", default=START_DEADLINE, metavar="DURATION", help="for all nodes to be there"
    )
    parser.add_argument("--interface", help="network interface of the nodes (default: that of Slurm's address)")
    parser.add_argument("--scratch", default="/tmp", help="folder on every node for Ray's own files, a short path")
    parser.add_argument("--container", default="", help="command that runs another one in a container")
    parser.add_argument("--stage", action="store_true", help="copy packages, tokens and compiled code to every node")
    parser.add_argument("--packs", metavar="DIR", help="where what is copied lies (default: beside the token caches)")
    parser.add_argument("--login", metavar="HOST", help="the host to go through to the nodes, for `dashboard`")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=f"{_COMMANDS} FILE.py, and its options")
    return parser


def launch(options: argparse.Namespace, received: Sequence[int]) -> int:
    """Start the cluster, run the command, end the cluster; returns the command's exit status.

    Raises NoResultError where fewer nodes than wanted are there in time, and ConfigError outside of a job.
    """
    program(options.command)  # a mistake in it goes before one about the job
    ask = functools.partial(ask_patiently, stop=lambda: bool(received))
    number, job = this_job(os.environ, ask)
    before = runs_before(os.environ)
    words = continued(options.command, number, before) if before or may_return(job) else options.command
    if before and (status := _settled(words)) is not None:
        return status
    status = on_cluster(options, received, number, job, words, ask)
    if may_return(job) and has_to_return(words, status, received, _left_at_the_end()):
        note("cluster: the allocation ends before the work does; the job goes back into the queue")
        requeue(os.environ)
    return status


def _left_at_the_end() -> float | None:
    """What Slurm leaves this job; None where it does not answer, which costs a command that is done no status."""
    try:
        return seconds_left(os.environ, ask_patiently)
    except ConfigError as error:
        note(f"cluster: {error}; the job does not go back into the queue by itself", sys.stderr)
        return None


def on_cluster(
    options: argparse.Namespace, received: Sequence[int], number: int, job: str, words: Sequence[str], ask: Ask
) -> int:
    """The exit status of the command `words` on a cluster that begins and ends with it."""
    began, since = time.monotonic(), time.time()
    seconds = parse_duration(options.start_deadline, "--start-deadline")
    container = _words(options.container)
    python = [*container, "python3" if container else sys.executable]
    shares = parse_shares(job)
    wanted = len(shares) if options.min_nodes is None else options.min_nodes
    if not 1 <= wanted <= len(shares):
        raise ConfigError(f"--min-nodes {wanted}: the job has {len(shares)} nodes; give 1 to {len(shares)}")
    logs = log_folder(job, number)
    with contextlib.suppress(OSError):  # said where a file cannot be made in it
        logs.mkdir(parents=True, exist_ok=True)
    steps = Steps(logs, secrets.token_hex(32), [*python, "-m", "tinyllm_ray.cluster.node"])
    staging = Staging(options.stage, python, options.packs, bool(container), number, options.scratch, received)
    try:
        head = shares[0].node
        place = {"job": number, "scratch": options.scratch, "interface": options.interface}
        place["staged"] = staging.stage(words, shares, seconds)
        deadline = Deadline.after(seconds)
        steps.start(as_node(shares[0], None, place | {"known_as": slurm_address(head, ask)}))
        gather(steps, [head], 1, deadline, received)
        address = steps.ready[head]["address"]
        for share in shares[1:]:
            steps.start(as_node(share, address, place))
        gather(steps, [share.node for share in shares], wanted, deadline, received)
        missing = [share.node for share in shares if share.node not in steps.ready]
        if head in missing:
            raise NoResultError(f"the cluster's head went away: {describe(steps, [head])}")
        steps.end(missing, 0.0)
        study = study_folder(words) if is_study(words) else None
        known = {"job": number, "began": since, "head": head, "login": options.login}
        known["study"] = study and str(study.absolute())
        _record(logs / RECORD, {**known, **steps.ready[head], "nodes": steps.ready})
        note(
            f"cluster: {len(steps.ready)} of {len(shares)} nodes ready at {address} in {time.monotonic() - began:.1f} s"
        )
        if missing:
            note(f"cluster: going on without {describe(steps, missing)}")
        left = seconds_left(os.environ, ask)
        environment = driver_environment(os.environ, steps.ready[head], left) | staging.variables()
        spare = HandBack(logs / HANDED_BACK, number, head, own_name(os.environ))
        status = run([*staging.driver_python, *program(words)], environment, steps, head, received, spare)
        staging.collect()
        return status
    finally:
        seconds = STAGED_END_SECONDS if staging.staged else STEP_END_SECONDS
        steps.end([share.node for share in shares], seconds)


def _record(path: Path, known: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(known))
    except OSError as error:
        note(f"cluster: {path}: {error.strerror}; status, dashboard and account will not know of it", sys.stderr)


def _settled(words: Sequence[str]) -> int | None:
    """Of a job that has come back: the status of a study with nothing left to do."""
    folder = study_folder(words) if is_study(words) else None
    status = settled_status(folder) if folder is not None else None
    if status is not None:
        note(f"cluster: the study in {folder} has ended, or used up its budget; its report stands")
    return status


def _words(container: str) -> list[str]:
    try:
        return shlex.split(container)
    except ValueError as error:
        raise ConfigError(f"--container: {container!r} is no command: {error}") from None


def program(words: Sequence[str]) -> list[str]:
    """Arguments of Python for a command: `tune --budget 45m`, or a file of the user's own."""
    words = words[1:] if words[:1] == ["--"] else words
    if words and words[0] in PROGRAMS:
        return ["-m", f"tinyllm_ray.{words[0]}", *words[1:]]
    if words[:1] == ["selfcheck"]:  # with --measure it measures on the job's cluster
        return ["-m", "tinyllm_ray.cluster", *words]
    if words and words[0].endswith(".py"):
        return list(words)
    raise ConfigError(
        f"{words[0] if words else 'no command'!r}: what to run on the cluster is {_COMMANDS} a FILE.py, "
        "like tune --budget 45m"
    )


def this_job(environment: Mapping[str, str], ask: Ask) -> tuple[int, str]:
    """This job's number and what Slurm says of it. Raises ConfigError outside of one."""
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdecimal():
        raise ConfigError(
            "this is no Slurm job (SLURM_JOB_ID is not set); see python -m tinyllm_ray.cluster submit --help"
        )
    return int(number), ask("scontrol", "show", "job", "--details", "--oneliner", own_name(environment))


def as_node(share: Share, head: str | None, place: Mapping[str, Any]) -> Node:
    return Node(name=share.node, head=head, cpus=share.cpus, gpus=share.gpus, memory_mib=share.memory_mib, **place)


def slurm_address(node: str, ask: Ask) -> str | None:
    """The address by which Slurm itself reaches a node; a host's own name may lead to a loopback address there."""
    return job_field(ask("scontrol", "show", "node", "--oneliner", node), "NodeAddr")


def gather(steps: Steps, nodes: Sequence[str], wanted: int, deadline: Deadline, received: Sequence[int]) -> None:
    """Wait until every one of `nodes` is ready or has failed; a step that Slurm did not answer is begun again.

    Raises NoResultError naming the missing ones where `wanted` cannot be reached, or is not by the deadline; Ended
    after a signal.
    """
    while True:
        ready = [node for node in nodes if node in steps.ready]
        if deadline.remaining() > 0:
            steps.start_unanswered(nodes)
        failed = [node for node in nodes if node in steps.ended]
        if len(ready) + len(failed) == len(nodes) and len(ready) >= wanted:
            return
        late = deadline.remaining() <= 0
        if late and len(ready) >= wanted:
            return
        if late or len(nodes) - len(failed) < wanted:
            missing = failed if not late else [node for node in nodes if node not in ready]
            raise NoResultError(f"{len(ready)} of {wanted} nodes are there; missing: {describe(steps, missing)}")
        if received:
            raise Ended
        steps.hear(_TICK_SECONDS)


def seconds_left(environment: Mapping[str, str], ask: Ask) -> float | None:
    """What Slurm leaves this job; None without a limit."""
    text = ask("squeue", "--noheader", f"--jobs={own_name(environment)}", "--format=%L").strip()
    with contextlib.suppress(ConfigError):
        return parse_slurm_time(text)
    return None  # NOT_SET, INVALID


if __name__ == "__main__":
    sys.exit(main())
