"""Where the study's driver itself becomes the limit: real decisions, events and reports, with no device and no Ray.

    python tests/benchmarks/driver_limit.py --out tests/benchmarks/results/driver_limit.json

The real StudyDriver and Report on a folder of this machine, over a table of five kernels beside the other settings
(`replay_factorial.py`): what one answer (`ask`), a trial's events (`hear`) and one record (judging, telling, the
report's files) take, in milliseconds of one core; a slow file system's waits are not in it. The driver is enough for
as many GPUs as its seconds a trial fit into the trial's own: `gpus`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from replay_factorial import factorial
from replay_machine import Machine

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import load
from tinyllm_ray.measure.environment import collect_environment
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.study import Study
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.report import Report

EVENTS_A_TRIAL = 12
"""Forked, six stages, three to five windows, the result."""
STEPS = ("ask", "events", "record")


def drive(trials: int, at_once: int) -> list[dict[str, float]]:
    """Milliseconds a step for each of `trials`, `at_once` of which are in flight."""
    table = factorial("kernels 1", 1)
    config = load("20m-32k")
    machine, environment = Machine(table, 0), dict(collect_environment())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        (out / "candidates").mkdir()
        study = Study(table.space, objective=Objective("throughput", 1e9, 100))
        driver = StudyDriver(study, "limit", config, None, out, Deadline.after(1e9))
        report = Report(out, "limit", config, 1e9, elapsed=lambda: 0.0)
        driver.changed = lambda row: report.write(driver)
        flying: list[dict[str, Any]] = []
        told: list[dict[str, float]] = []
        while len(told) < trials:
            steps = {}
            while len(flying) < at_once:
                began = time.process_time()
                request = driver.ask()
                steps["ask"] = 1000 * (time.process_time() - began)
                if request is None:
                    break
                flying.append(dict(request))
            if not flying:
                break
            request = flying.pop(0)
            began = time.process_time()
            for number in range(EVENTS_A_TRIAL):
                driver.hear(request["candidate"], {"event": "stage", "stage": f"stage {number}"})
            steps["events"] = 1000 * (time.process_time() - began)
            record = recorded(machine, request, environment)
            began = time.process_time()
            driver.hear(request["candidate"], {"event": "record", "record": record})
            steps["record"] = 1000 * (time.process_time() - began)
            told.append(steps)
        return told


def recorded(machine: Machine, request: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """A candidate's record as it comes over Ray."""
    made = machine.measure(request["config"]["execution"], candidate=request["candidate"])
    fields = {"environment": environment, "recipe_identity": load("20m-32k").recipe_identity}
    return TrialRecord.model_validate({**made.model_dump(mode="json"), **fields}).model_dump(mode="json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--trial-seconds", type=float, default=15.0, help="of one candidate on an H200, its cache warm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for at_once in options.at_once:
        told = drive(options.trials, at_once)
        for first, last in ((0, 20), (20, 60), (60, len(told))):
            part = told[first:last]
            if not part:
                continue
            step = {name: statistics.median([one[name] for one in part if name in one] or [0.0]) for name in STEPS}
            total = sum(step.values())
            gpus = 1000 * options.trial_seconds / total
            results.append({"at_once": at_once, "records": [first, first + len(part)], **step, "gpus": gpus})
            words = ", ".join(f"{name} {value:.1f}" for name, value in step.items())
            print(
                f"{at_once} at once, records {first} to {first + len(part)}: {words} ms; keeps up with {gpus:.0f} GPUs"
            )
    if options.out:
        options.out.write_text(
            json.dumps({"trial_seconds": options.trial_seconds, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
