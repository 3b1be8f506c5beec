"""Folders of studies of a tiny recipe, with records that were made up and an environment that is this machine's."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from command_line import TINY_RECIPE, TINY_SPACE, Finished

from tinyllm_ray import journal
from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config, load
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.measure.environment import collect_environment, devices, source_identity, usable_cores
from tinyllm_ray.records import Fate, TrialRecord, Window
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.space import load_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.outcome import RunningCandidate, build_record
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import CANDIDATES, DEFINITION, TRIALS, Definition
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.same_study import space_identity
from tinyllm_ray.yamlfile import dump_yaml

STUDY = "20260101-000000-abcdef"
Rate = Callable[[dict[str, Any]], float | Fate]
"""Targets a second of an execution, or how it ends."""


def write_study(
    folder: Path, rate: Rate, cache_identity: str | None = None, *, verify: bool = False
) -> list[TrialRecord]:
    """A finished study in `folder`; its records."""
    (folder / CANDIDATES).mkdir(parents=True)
    config, fitted = recipe(folder), space(folder)
    definition = Definition(
        study=STUDY,
        recipe_identity=config.recipe_identity,
        space=fitted.name,
        space_identity=space_identity(fitted),
        budget="120s",
        recipe=config.model_dump(mode="json"),
    )
    (folder / DEFINITION).write_text(dump_yaml(definition.model_dump(mode="json")))
    verifier = PairedVerifier(fitted.protocol, most_seconds=400) if verify else None
    driver = StudyDriver(Study(fitted, verifier=verifier), STUDY, config, None, folder, Deadline.after(1000))
    records = finish(driver, rate, cache_identity)
    facts = {"space": fitted.name, "protocol": fitted.protocol.model_dump(), "device_kind": "cpu", "nodes": 1}
    Report(folder, STUDY, config, 120.0, lambda: 60.0, facts).write(driver)
    journal.append_lines(folder / TRIALS, [record.model_dump(mode="json") for record in records])
    return records


def recipe(folder: Path) -> Config:
    path = folder.parent / "recipe.yaml"
    path.write_text(TINY_RECIPE)
    return load(path)


def space(folder: Path) -> FittedSpace:
    path = folder.parent / "space.yaml"
    path.write_text(TINY_SPACE)
    return fit_space(load_space(path), recipe(folder), "cpu", usable_cores())


def finish(driver: StudyDriver, rate: Rate, cache_identity: str | None = None) -> list[TrialRecord]:
    """Run a driver to its end; its records."""
    records: list[TrialRecord] = []
    driver.publish = records.append
    while (request := driver.ask()) is not None:
        driver.hear(request["candidate"], ended(request, rate(request["config"]["execution"]), cache_identity))
    return records


def ended(request: Any, outcome: float | Fate, cache_identity: str | None = None) -> dict[str, Any]:
    """The last event of a candidate."""
    running = RunningCandidate({**request, "cache_identity": cache_identity}, Deadline.after(1), 0.0, time.time())
    for stage, seconds in (("start", None), ("compile", 1.0), ("warmup", 1.0), ("windows", 1.5)):
        running.hear({"event": "stage", "stage": stage} | ({"seconds": seconds} if seconds else {}))
    fate = outcome if isinstance(outcome, Fate) else Fate.COMPLETE
    if not isinstance(outcome, Fate):
        for index, factor in enumerate((1.0, 1.001, 0.999)):
            running.hear({"event": "window", "window": window(index, outcome * factor)})
        proof = {"trajectory": [{"update": 10, "loss": 9.0, "grad_norm": 1.0}]}
        seen = {"targets_per_second": outcome, "seconds_per_update": 512 / outcome, "proof": proof}
        running.hear({"event": "result", **seen, "devices": [one.model_dump(mode="json") for one in devices()]})
    source = source_identity()
    identity = {"sha256": source.sha256, "dirty": source.dirty}
    reason = None if fate == Fate.COMPLETE else "why"
    record = build_record(running, fate, reason, 4.0, environment(), identity, None)
    return {"event": "record", "record": record.model_dump(mode="json")}


@functools.cache
def environment() -> dict[str, Any]:
    return collect_environment()


def window(index: int, rate: float) -> dict[str, Any]:
    return Window(
        index=index,
        updates=2,
        targets=1024,
        seconds=1024 / rate,
        targets_per_second=rate,
        data_wait_seconds=0.0,
        loss=9.0,
        grad_norm=1.0,
        timestamp=time.time(),
    ).model_dump(mode="json")


def tune(built_root: Path, cwd: Path, *arguments: object) -> Finished:
    """`python -m tinyllm_ray.tune` over the default cache, in a process of its own that may take its time."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm_ray.tune", *map(str, arguments)],
        cwd=cwd,
        env=variables | {CACHE_VARIABLE: str(built_root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Finished(done.returncode, done.stdout)


def replace_records(folder: Path, records: Iterable[TrialRecord]) -> None:
    (folder / TRIALS).unlink(missing_ok=True)
    journal.append_lines(folder / TRIALS, [record.model_dump(mode="json") for record in records])
