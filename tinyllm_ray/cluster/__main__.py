"""Jobs on a Slurm cluster: `python -m tinyllm_ray.cluster submit --nodes 4 --gpus-per-node 4 -- tune --budget 45m`.

Neither Ray nor torch is imported, so that it answers at once on a login node.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from tinyllm_ray.cluster import jobs
from tinyllm_ray.cluster.account_command import account_command
from tinyllm_ray.cluster.selfcheck_command import add_selfcheck, selfcheck
from tinyllm_ray.cluster.submit import add_options, script_of
from tinyllm_ray.command import Parser, examples_of, exit_status, say
from tinyllm_ray.data.options import build_parser as data_parser
from tinyllm_ray.errors import EXIT_DONE, ConfigError
from tinyllm_ray.train.options import build_parser as training_parser
from tinyllm_ray.tune.options import build_parser as study_parser

_EPILOG = """examples:
  python -m tinyllm_ray.cluster submit --nodes 4 --gpus-per-node 4 --time 1:00:00 --account proj42 -- tune --budget 45m
  python -m tinyllm_ray.cluster submit --site mysite.yaml --nodes 2 --dry-run -- tune --budget 45m --preset 50m
  python -m tinyllm_ray.cluster submit --requeue --time 1:00:00 --nodes 2 -- tune --budget 3h --out studies/20m
      three hours in several runs of the job; it comes back after preemption, too
  python -m tinyllm_ray.cluster status
  python -m tinyllm_ray.cluster logs 1234 --follow
  python -m tinyllm_ray.cluster dashboard 1234
  python -m tinyllm_ray.cluster cancel 1234
  python -m tinyllm_ray.cluster selfcheck
  python -m tinyllm_ray.cluster account 1234

exit status: 0 done; 1 a fault of the program; 2 a mistake in the request, or Slurm refuses it. The job's own is that of
the command it runs, 3 where not enough nodes came up; selfcheck's is 3 where a check fails
"""

_ACCOUNTS = """examples:
  python -m tinyllm_ray.cluster account 1234
      one job: the trials that ran in it, beside what sacct, sacct -c or scontrol tells of it
  python -m tinyllm_ray.cluster account studies/20m --json
      all jobs that the study ran in

start, compile, warmup, windows and proof are the phases of the search's trials, verify all of the trials that measured
again; other is a trial's time beside its phases, idle what was allocated and no trial held
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "submit": _submit,
        "status": _status,
        "logs": _logs,
        "cancel": _cancel,
        "dashboard": _dashboard,
        "selfcheck": selfcheck,
        "account": lambda options: account_command(options.what, options.json),
    }

    def run() -> int:
        return commands[options.action](options) or EXIT_DONE

    return exit_status(run)


def build_parser() -> Parser:
    """The command line."""
    prog = "python -m tinyllm_ray.cluster"
    parser = Parser(prog, "Submit and watch jobs on a Slurm cluster, and check a machine.", _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(
            name, help=text, prog=f"{prog} {name}", description=text, epilog=epilog or examples_of(_EPILOG, name)
        )
        return added

    add_options(add("submit", "Submit a job that runs a command of tinyllm_ray on a Ray cluster of its own."))
    status = add("status", "Say what a job does, or list all of yours.")
    status.add_argument("job", type=int, nargs="?")
    logs = add("logs", "Print a job's log.")
    logs.add_argument("job", type=int)
    logs.add_argument("--follow", action="store_true", help="wait for it and go on as it grows, until Ctrl-C")
    logs.add_argument("--node", help="what Ray said on that node instead")
    add("cancel", "End a job.").add_argument("job", type=int)
    dashboard = add("dashboard", "Print how to reach Ray's dashboard from your own machine.")
    dashboard.add_argument("job", type=int)
    account = add("account", "Say what a job's GPU seconds went to, how it ended, and the energy it took.", _ACCOUNTS)
    account.add_argument("what", metavar="JOB|OUT", help="a job's number, or a study's folder")
    account.add_argument("--json", action="store_true", help="for programs: one JSON object")
    dashboard.add_argument("--login", metavar="HOST", help="the host to go through to the nodes (default: the site's)")
    add_selfcheck(add("selfcheck", "Check this machine before a study spends an allocation on it."))
    return parser


def _submit(options: argparse.Namespace) -> None:
    script = script_of(options)
    _check_options(options.words)
    if options.dry_run:
        say(script.rstrip("\n"))
        return
    number = jobs.submit(script)
    say(f"job {number}, log {Path.cwd() / f'tinyllm-{number}.log'}")
    say(f"watch: python -m tinyllm_ray.cluster logs {number} --follow")
    say(f"also:  status {number}, dashboard {number}, cancel {number}")


def _check_options(words: list[str]) -> None:
    """End as the command itself would for options that it does not take; the job would say so after the queue."""
    parsers = {"tune": study_parser, "train": training_parser, "data": data_parser, "selfcheck": build_parser}
    name, *arguments = words[1:] if words[0] == "--" else words
    if name in ("tune", "train") and arguments and not arguments[0].startswith("-"):
        return  # a command beside the program's own, such as `tune report`, has options of its own
    if name in parsers:
        parsers[name]().parse_args([name, *arguments] if name == "selfcheck" else arguments)


def _status(options: argparse.Namespace) -> None:
    if options.job is None:
        rows = jobs.parse_queue(jobs.ask_slurm("squeue", "--me", "--noheader", f"--format={jobs.QUEUE_FORMAT}"))
        for row in rows:
            say("  ".join(f"{value:<{width}}" for value, width in zip(row, (10, 12, 12, 24, 20), strict=True)).rstrip())
        if not rows:
            say("you have no jobs")
        return
    job = jobs.show(options.job)
    parts = [
        job.state,
        job.reason and f"({job.reason})",
        job.nodes and f"on {job.nodes}",
        job.limit and f"limit {job.limit}",
    ]
    say(f"job {job.number}: {' '.join(part for part in parts if part)}")
    if job.log is not None:
        say(f"log: {job.log}")
    if job.state == "RUNNING":
        try:
            record = jobs.cluster_record(job)
        except ConfigError:
            say("cluster: not ready yet")
        else:
            say(f"cluster: {len(record['nodes'])} nodes, {', '.join(record['nodes'])}; head {record['head']}")


def _logs(options: argparse.Namespace) -> None:
    job = jobs.show(options.job)
    path = job.log or Path(f"tinyllm-{job.number}.log")
    if options.node is not None:
        path = path.with_suffix("") / f"{options.node}.log"
    if options.follow and job.active and not path.exists():
        why = f" ({job.reason})" if job.reason else ""
        say(f"job {job.number} is {job.state}{why}; waiting for {path}", sys.stderr)
        jobs.await_log(path, lambda: jobs.show(options.job))
    if not path.is_file():
        raise ConfigError(f"{path} is not there; job {job.number} is {job.state}")
    if options.follow:
        os.execvp("tail", ["tail", "--lines=+1", "--follow=name", "--retry", str(path)])
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            say(line.rstrip("\n"))


def _cancel(options: argparse.Namespace) -> None:
    job = jobs.show(options.job)  # scancel says nothing of a job that is not there
    if not job.active:
        raise ConfigError(f"job {job.number} has ended already: {job.state}")
    jobs.cancel(job)
    say(f"job {options.job} is told to end")


def _dashboard(options: argparse.Namespace) -> None:
    job = jobs.show(options.job)
    if not job.active:
        raise ConfigError(f"job {job.number} has ended ({job.state}), and its dashboard with it")
    record = jobs.cluster_record(job)
    port, head = record["dashboard_port"], record["head"]
    login = options.login or record.get("login")
    through = ["-J", login] if login else []
    tunnel = ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", *through, head]
    step = ["srun", f"--jobid={options.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={head}"]
    say(f"on your machine:  {shlex.join(tunnel)}")
    say(f"then open:        http://127.0.0.1:{port}")
    say(f"its token, here:  {shlex.join([*step, 'cat', record['token']])}")


if __name__ == "__main__":
    sys.exit(main())
