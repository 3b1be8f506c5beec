"""Talks to Slurm's own commands: submits, asks, cancels; a refusal of theirs becomes one line.

Standard library only: the launcher imports this module.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Clock
from tinyllm_ray.cluster.nodes import job_field
from tinyllm_ray.command import note
from tinyllm_ray.errors import ConfigError

ASK_SECONDS = 60.0
"""For a command of Slurm to answer; they wait by themselves while slurmctld restarts."""
_LOOK_SECONDS = 5.0
"""Between two questions to slurmctld, which all users of a cluster ask."""
RECORD = "cluster.json"
"""The file in a job's log folder that says where its cluster is."""
QUEUE_FORMAT = "%i|%T|%L|%R|%j"

_ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING"}
AWAY_SECONDS = 300.0
"""slurmctld is away for minutes where it restarts or another host takes over; its commands give up after 9 to 18 s."""
_AWAY = re.compile(r"Unable to contact slurm controller|Socket timed out|did not answer within")
_USERS_VIEW = ("SQUEUE_", "SACCT_", "SCONTROL_")
_PREFIX = re.compile(r"^(?:sbatch|squeue|scontrol|scancel|sacct|slurm_\w+)(?:: error:| error:|:)\s*")
_NUMBER = re.compile(r"(\d{1,10})(?:;\S*)?\s*", re.ASCII)


@dataclass(frozen=True)
class Job:
    """What Slurm knows of a job."""

    number: int
    state: str
    reason: str | None
    """Why it waits or how it ended, as Slurm has it; None where it says nothing."""
    nodes: str | None
    limit: str | None
    """Its time limit, as Slurm writes it."""
    log: Path | None
    task: str | None = None
    """Of an array, like 4_1: by its own number scancel ends it not, and says so to nobody (22.05)."""

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or may run again."""
        return self.state in _ACTIVE


def ask_slurm(*command: str, text: str = "") -> str:
    """Standard output of a command of Slurm. Raises ConfigError with its own words, on one line, where it fails."""
    try:
        done = subprocess.run(
            command,
            env=None if command[0] == "sbatch" else _asking(os.environ),  # a job inherits sbatch's
            input=text,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on the PATH; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {ASK_SECONDS:.0f} s; is Slurm well?") from None
    if done.returncode:
        raise ConfigError(f"{command[0]}: {refusal(done.stderr) or f'exit status {done.returncode}'}")
    return done.stdout


def is_away(words: str) -> bool:
    """Whether a command of Slurm complains that nobody answers, which may be over in a minute."""
    return bool(_AWAY.search(words))


def ask_patiently(
    *command: str,
    stop: Callable[[], bool] = lambda: False,
    ask: Callable[..., str] = ask_slurm,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """As `ask_slurm`, and again for AWAY_SECONDS while slurmctld is away, unless it is to `stop`."""
    end = clock() + AWAY_SECONDS
    while True:
        try:
            return ask(*command)
        except ConfigError as error:
            if not is_away(str(error)) or stop() or clock() >= end:
                raise
            note(f"cluster: {error}; asking again", sys.stderr)
        sleep(_LOOK_SECONDS)


def _asking(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a question: a user's own filters and formats would change the answer."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_USERS_VIEW)}
    return kept | {"SLURM_TIME_FORMAT": "standard"}


def refusal(stderr: str) -> str:
    """What a command of Slurm complained of, on one line, every complaint once."""
    lines = [_PREFIX.sub("", line.strip()) for line in stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))


def submit(script: str) -> int:
    """Submit a script; the job's number. Raises ConfigError with sbatch's words where it is refused."""
    answer = ask_slurm("sbatch", "--parsable", text=script)
    match = _NUMBER.fullmatch(answer.splitlines()[-1]) if answer.strip() else None
    if match is None:
        raise ConfigError(f"sbatch answered {answer.strip()!r} instead of a job's number")
    return int(match[1])


def cancel(job: Job) -> None:
    """End a job; by the number of an array, all of its tasks. Raises ConfigError where Slurm refuses."""
    ask_slurm("scancel", job.task or str(job.number))


def own_name(environment: Mapping[str, str]) -> str:
    """What Slurm calls this job alone: the number of an array's last task is the whole array's."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def of_job(number: int, text: str) -> str:
    """A job's line of `scontrol show job --oneliner`, which for an array's number has one for every task."""
    own = [line for line in text.splitlines() if line.startswith(f"JobId={number} ")]
    return own[0] if own else text


def show(number: int) -> Job:
    """What Slurm says of a job: of a running or recent one scontrol, of one long gone sacct. Raises ConfigError."""
    try:
        return parse_job(number, ask_slurm("scontrol", "show", "job", "--oneliner", str(number)))
    except ConfigError as error:
        if "nvalid job id" not in str(error):
            raise
    try:
        answer = ask_slurm(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}", "--format=State,NodeList,WorkDir"
        )
    except ConfigError:
        answer = ""  # accounting may be off
    return parse_accounting(number, answer)


def await_log(path: Path, look: Callable[[], Job], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return once a job's log is there; `look` says what Slurm knows of the job. Raises ConfigError if none comes."""
    while not path.exists():
        sleep(_LOOK_SECONDS)
        job = look()
        if not job.active and not path.exists():
            raise ConfigError(f"{path} is not there; job {job.number} is {job.state}")


def parse_queue(text: str) -> list[tuple[str, str, str, str, str]]:
    """Rows of squeue in QUEUE_FORMAT: number, state, time left, nodes or why it waits, name."""
    rows = []
    for line in text.splitlines():
        number, state, left, nodes, name = line.split("|", 4)
        rows.append((number, state, left, nodes, name))
    return rows


def parse_job(number: int, text: str) -> Job:
    """A job from `scontrol show job --oneliner`."""
    text = of_job(number, text)
    log = job_field(text, "StdOut")
    array, task = job_field(text, "ArrayJobId"), job_field(text, "ArrayTaskId")
    return Job(
        number,
        job_field(text, "JobState") or "UNKNOWN",
        job_field(text, "Reason"),
        job_field(text, "NodeList"),
        job_field(text, "TimeLimit"),
        Path(log) if log else None,
        f"{array}_{task}" if array and array != str(number) else None,
    )


def parse_accounting(number: int, text: str) -> Job:
    """A job from sacct's `State|NodeList|WorkDir`. Raises ConfigError where it has no row."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]
    if not rows:
        raise ConfigError(f"Slurm knows no job {number}; python -m tinyllm_ray.cluster status lists yours")
    state, nodes, folder = rows[-1][:3]  # a requeued job has a row a run
    word, _, reason = state.partition(" ")
    return Job(number, word, reason or None, nodes or None, None, Path(folder) / f"tinyllm-{number}.log")


def log_folder(job: str, number: int) -> Path:
    """Where a job's nodes leave their logs, from `scontrol show job`: beside its log, under the same name."""
    log = job_field(job, "StdOut")
    if log is None or not log.endswith(".log"):
        return Path(job_field(job, "WorkDir") or ".") / f"tinyllm-{number}"
    return Path(log.removesuffix(".log"))


def cluster_record(job: Job) -> dict[str, Any]:
    """What the launcher wrote of a job's cluster. Raises ConfigError while there is none."""
    path = (job.log.with_suffix("") if job.log else Path(f"tinyllm-{job.number}")) / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"job {job.number} is {job.state} and has no cluster yet ({path} is not there)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return record
