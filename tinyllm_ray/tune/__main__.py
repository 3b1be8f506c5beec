"""Find the fastest way to run a recipe, within a time budget: `python -m tinyllm_ray.tune --budget 45m`.

Standard library only, so that the budget counts from the process's start before anything slow is imported.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tinyllm_ray.allocation import within_allocation
from tinyllm_ray.clock import Deadline, parse_duration
from tinyllm_ray.command import exit_status, note, run_command
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune.budget import seconds_left
from tinyllm_ray.tune.channel import STUDY_COMMAND
from tinyllm_ray.tune.going_on import going_on
from tinyllm_ray.tune.options import build_parser
from tinyllm_ray.tune.page.maker import bring_up_to_date
from tinyllm_ray.tune.preset_names import preset_list, study_folders
from tinyllm_ray.tune.supervisor import process_age_seconds, supervise


def _report(arguments: list[str]) -> int:
    from tinyllm_ray.tune.page.command import report_command

    return report_command(arguments)


def _rerun(arguments: list[str]) -> int:
    from tinyllm_ray.tune.again.command import rerun_command

    return rerun_command(arguments)


def _validate(arguments: list[str]) -> int:
    from tinyllm_ray.tune.again.command import validate_command

    return validate_command(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"report": _report, "rerun": _rerun, "validate": _validate}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    if (status := run_command(COMMANDS, arguments, parser)) is not None:
        return status
    options = parser.parse_args(arguments)
    return exit_status(lambda: _supervise(options, arguments))


def _supervise(options: argparse.Namespace, arguments: list[str]) -> int:
    budget = parse_duration(options.budget, "--budget")
    if options.resume and options.out is None:
        raise ConfigError("--resume: which study? name its folder with --out")
    left = seconds_left(budget, options.out, resume=True) if options.resume else budget
    began = time.monotonic() - process_age_seconds()  # with what a slow folder took to say it
    request = _request(options, budget)
    out = Path(str(request["out"]))
    whole = Deadline(began + left)
    deadline = within_allocation(whole, os.environ)
    request["age_seconds"] = time.monotonic() - began  # last: on busy cores tenths of a second pass anywhere
    outcome = supervise(STUDY_COMMAND, request=request, deadline=deadline)
    if outcome.mirrored:  # the folder is this study's, and its file system answers
        for folder in study_folders(out, preset_list(options.presets)):
            bring_up_to_date(folder, deadline)
    if outcome.journal and (line := going_on(arguments, out, outcome.exit_status, whole.remaining())):
        note(line, sys.stderr)
    return outcome.exit_status


def _request(options: argparse.Namespace, budget: float) -> dict[str, object]:
    protocol = {
        key: value
        for key in ("data_mode", "warmup_updates", "windows", "updates_per_window")
        if (value := getattr(options, key)) is not None
    }
    return {
        "budget": options.budget,
        "total_seconds": budget,
        "recipe": options.preset or options.config,
        "overrides": options.set,
        "space": options.space,
        "protocol": protocol,
        "search_windows": options.search_windows,
        "objective": options.objective,
        "runs": options.runs,
        "out": str(options.out or Path("studies") / time.strftime("%Y%m%d-%H%M%S")),
        "resume": options.resume,
        "retry": [word.strip() for word in options.retry.split(",") if word.strip()],
        "presets": preset_list(options.presets),
        "decisions": [options.decisions] if options.decisions else [],
        "address": options.address or os.environ.get("RAY_ADDRESS") or None,
        "by_device": options.by_device,
    }


if __name__ == "__main__":
    sys.exit(main())
