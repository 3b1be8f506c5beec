"""`tune rerun` and `tune validate`: their command lines, and the same from Python.

The standard library alone at the top, so that the budget counts before anything slow is imported.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm_ray.allocation import within_allocation
from tinyllm_ray.clock import Deadline, parse_duration
from tinyllm_ray.command import Parser, exit_status
from tinyllm_ray.errors import EXIT_NO_RESULT, EXIT_SIGINT, EXIT_USER, ConfigError, NoResultError, TinyllmRayError
from tinyllm_ray.tune.channel import STUDY_COMMAND
from tinyllm_ray.tune.page.maker import bring_up_to_date
from tinyllm_ray.tune.supervisor import Outcome, process_age_seconds, supervise

if TYPE_CHECKING:
    from tinyllm_ray.records import TrialRecord
    from tinyllm_ray.search.repeat import Difference

RERUN_BUDGET = "10m"
"""A limit against what hangs: a candidate takes seconds, the longest compilations a few minutes."""
VALIDATE_BUDGET = "90s"

_RERUN_EPILOG = """examples:
  python -m tinyllm_ray.tune rerun studies/50m c03
      measures c03-mb32-compiled-default-auto-t8 again, with the study's protocol, tokens and proof
  python -m tinyllm_ray.tune rerun studies/50m c07-mb64-compiled-max-autotune-flash-t8 --budget 5m
      one that failed, was lost or was cut is tried again the same way

A candidate that has a figure keeps it: the new record is a repeat, which tells how far two processes of one execution
differ, so that nobody measures until luck has made a winner. One that has none gets the new record for its own. Both
records stay, summary and page are made again, and the time taken is added to the study's.

exit status: 0 the candidate ran; 1 a fault of the program; 2 a mistake in the request, or another source, cache or
device than the study's; 3 it gave no figure that can be believed; 130 and 143 ended by SIGINT and SIGTERM
"""

_VALIDATE_EPILOG = """examples:
  python -m tinyllm_ray.tune validate studies/50m/selected.yaml
      winner and baseline in interleaved pairs of fresh processes, in a minute and a half
  python -m tinyllm_ray.tune validate studies/50m/selected.yaml --budget 5m
      more pairs and longer windows, on a machine whose figures vary
  python -m tinyllm_ray.tune validate mine.yaml
      a configuration without a study: beside what a study would start from here

It says which versions and which device are others than the study's. Its records go to validations/ beside the
configuration, or to --out; nothing of the study is changed.

exit status: 0 the decision holds; 1 a fault of the program; 2 a mistake in the request; 3 it no longer holds, or could
not be told: the closing lines say which; 130 and 143 ended by SIGINT and SIGTERM
"""


def rerun_parser() -> Parser:
    """The command line of `tune rerun`."""
    parser = Parser("python -m tinyllm_ray.tune rerun", "One candidate of a study measured again.", _RERUN_EPILOG)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of a study")
    parser.add_argument("candidate", metavar="ID", help="the candidate's name, or the part before its first dash")
    _add_common(parser, RERUN_BUDGET)
    return parser


def validate_parser() -> Parser:
    """The command line of `tune validate`."""
    parser = Parser(
        "python -m tinyllm_ray.tune validate",
        "Whether a study's decision still holds on this machine and these versions.",
        _VALIDATE_EPILOG,
    )
    parser.add_argument("selected", metavar="SELECTED.YAML", type=Path, help="the configuration a study selected")
    _add_common(parser, VALIDATE_BUDGET)
    parser.add_argument("--by-device", metavar="KIND", help="of a cluster's kinds of GPU (default: the study's)")
    parser.add_argument(
        "--out", type=Path, help="folder for the records (default: validations/ and the time, beside it)"
    )
    return parser


def rerun_command(arguments: list[str]) -> int:
    """Run `rerun` with the arguments after its name; returns the exit status."""
    options = rerun_parser().parse_args(arguments)
    began = time.monotonic() - process_age_seconds()
    asked = options.out, options.candidate, options.budget, options.address
    return exit_status(lambda: _rerun(*asked, began).exit_status)


def validate_command(arguments: list[str]) -> int:
    """Run `validate` with the arguments after its name; returns the exit status."""
    options = validate_parser().parse_args(arguments)
    began = time.monotonic() - process_age_seconds()

    def run() -> int:
        selected = _configuration(options.selected)
        out = options.out or _validation_folder(selected)
        return _validate(selected, options.budget, out, options.address, options.by_device, began).exit_status

    return exit_status(run)


@dataclass(frozen=True)
class Rerun:
    """What became of a candidate that was measured again."""

    before: "TrialRecord"
    """The record that counted so far."""
    after: "TrialRecord"
    difference: "Difference | None"
    """Ratio and noise; None where one of the two has no figure."""


@dataclass(frozen=True)
class Validated:
    """The answer on a decision."""

    outcome: str
    """holds, no longer holds, could not be told."""
    reason: str
    ratio: float | None
    """Throughput of the selected execution over the baseline's (where that is selected, of the one that came closest);
    None without a pair."""
    answer: Mapping[str, Any]
    """The content of `validation.json`."""
    out: Path

    @property
    def holds(self) -> bool:
        return self.outcome == "holds"


def rerun(out: str | Path, candidate: str, *, budget: str = RERUN_BUDGET, address: str | None = None) -> Rerun:
    """Measure one candidate of the study in `out` again, as `tune rerun` does.

    >>> from tinyllm_ray.tune import rerun
    >>> again = rerun("studies/20m", "c03")  # doctest: +SKIP
    >>> print(again.difference)  # doctest: +SKIP
    0.4% slower: within the noise (1.1%)

    Raises ConfigError for a mistake, and where source, cache or device are not the study's; NoResultError where nothing
    was measured; KeyboardInterrupt after Ctrl-C.
    """
    from tinyllm_ray.records import read_records
    from tinyllm_ray.search.repeat import difference
    from tinyllm_ray.tune.folder import TRIALS

    folder = Path(out)
    known = read_records(folder / TRIALS)
    outcome = _rerun(folder, candidate, budget, address, time.monotonic())
    records = read_records(folder / TRIALS)
    if len(records) == len(known):
        raise _error(outcome)
    after = records[-1]
    own = [one for one in known if one.execution_identity == after.execution_identity and one.purpose == "search"]
    before = next((one for one in reversed(own) if one.fate == "complete"), own[-1])
    return Rerun(before, after, difference(before, after, known))


def validate(
    selected: str | Path,
    *,
    budget: str = VALIDATE_BUDGET,
    out: str | Path | None = None,
    address: str | None = None,
    by_device: str | None = None,
) -> Validated:
    """Put a study's decision to the test, as `tune validate` does: `selected` is its configuration's file.

    On a cluster with GPUs of several kinds it runs on the study's kind, or on `by_device`, like "H200".

    >>> from tinyllm_ray.tune import validate
    >>> found = validate("studies/20m/selected.yaml")  # doctest: +SKIP
    >>> found.holds, found.reason  # doctest: +SKIP
    (True, 'c03-... is 1.715x the baseline (1.702 to 1.728 with 90%, 3 pairs of processes)')

    Raises ConfigError for a mistake, NoResultError where nothing was measured, KeyboardInterrupt after Ctrl-C.
    """
    path = _configuration(Path(selected))
    folder = Path(out) if out is not None else _validation_folder(path)
    outcome = _validate(path, budget, folder, address, by_device, time.monotonic())
    answer = folder / "validation.json"
    if outcome.exit_status not in (0, EXIT_NO_RESULT) or not answer.is_file():
        raise _error(outcome)
    told = json.loads(answer.read_text())
    ratio = told["speedup"]["ratio"] if told["speedup"] else None
    return Validated(told["outcome"], told["reason"], ratio, told, folder)


def _add_common(parser: Parser, budget: str) -> None:
    parser.add_argument(
        "--budget", default=budget, metavar="DURATION", help=f"wall clock for everything (default: {budget})"
    )
    parser.add_argument("--address", help="Ray cluster to join (default: $RAY_ADDRESS, else a local one is started)")


def _configuration(path: Path) -> Path:
    """The file meant by a path, which may be the study's folder."""
    return path / "selected.yaml" if path.is_dir() else path


def _validation_folder(selected: Path) -> Path:
    return selected.parent / "validations" / time.strftime("%Y%m%d-%H%M%S")


def _rerun(out: Path, candidate: str, budget: str, address: str | None, began: float) -> Outcome:
    outcome, deadline = _supervise("rerun", budget, address, began, {"out": str(out), "candidate": candidate})
    if outcome.mirrored:  # the folder is this study's, and its file system answers
        bring_up_to_date(out, deadline)
    return outcome


def _validate(
    selected: Path, budget: str, out: Path, address: str | None, by_device: str | None, began: float
) -> Outcome:
    asked = {"out": str(out), "selected": str(selected), "by_device": by_device}
    return _supervise("validate", budget, address, began, asked)[0]


def _supervise(
    task: str, budget: str, address: str | None, began: float, asked: Mapping[str, str | None]
) -> tuple[Outcome, Deadline]:
    """`began` is on time.monotonic; the budget counts from there."""
    seconds = parse_duration(budget, "--budget")
    deadline = within_allocation(Deadline(began + seconds), os.environ)
    request = {
        "task": task,
        "budget": budget,
        "total_seconds": seconds,
        "age_seconds": time.monotonic() - began,
        "address": address or os.environ.get("RAY_ADDRESS") or None,
        **asked,
    }
    return supervise(STUDY_COMMAND, request=request, deadline=deadline), deadline


def _error(outcome: Outcome) -> BaseException:
    """What a Python caller is told of an end without a result."""
    message = outcome.message or f"it ended with status {outcome.exit_status}"
    if outcome.journal is not None and not outcome.mirrored:
        message = f"{message}; its records are in {outcome.journal}"
    kinds: dict[int, type[BaseException]] = {
        EXIT_USER: ConfigError,
        EXIT_NO_RESULT: NoResultError,
        EXIT_SIGINT: KeyboardInterrupt,
    }
    return kinds.get(outcome.exit_status, TinyllmRayError)(message)
