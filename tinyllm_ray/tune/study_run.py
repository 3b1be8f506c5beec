"""A study from a checked request to its report: Ray, tokens, trials."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.trials import run_trials
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import CANDIDATES, Definition, Earlier, begin_study
from tinyllm_ray.tune.live import Row, View, open_display, say
from tinyllm_ray.tune.report import Report, closing_lines
from tinyllm_ray.tune.request import Asked, Interrupted, StudyRequest
from tinyllm_ray.tune.supervisor import process_age_seconds

_CLOSING_SECONDS = 6.0
"""Kept free at the end for stopping Ray (1.3-4 s on two busy cores) and the last report."""
_CLOSING_SHARE = 0.1
"""Of the budget, where that is less."""


def run_study(
    request: StudyRequest,
    asked: Asked,
    earlier: Earlier | None,
    out: Path,
    channel: Channel,
    console: Console,
    deadline: Deadline,
) -> int:
    """Run the study to its end; returns the exit status. Raises ConfigError for what does not fit the machine."""
    say(console, f"budget {request.budget}; starting Ray")
    with connect(request.address) as connection:
        say(console, _describe(connection))
        config, space, notes = asked.for_machine(connection.device_kind)
        fitted = fit_space(space, config, connection.device_kind, connection.cores_per_node)
        for note in [*notes, *fitted.notes]:
            say(console, note)
        definition = begin_study(out, earlier, config, fitted, request)
        channel.send("out", study=definition.study, path=str(out))
        cache = _open_tokens(config, fitted)
        spent = earlier.spent_seconds if earlier else 0.0
        report = Report(
            out=out,
            study_id=definition.study,
            config=config,
            budget_seconds=request.total_seconds,
            elapsed=lambda: spent + request.age_seconds + process_age_seconds(),
            facts=_facts(definition, fitted, connection, cache),
        )
        study = Study(fitted, fitted.protocol, earlier.records if earlier else ())
        driver = _measure(study, report, channel, console, deadline.earlier_by(spent), connection, cache)
    report.write(driver, ended=driver.end)
    for line in closing_lines(driver, _shortest(out)):
        say(console, line)
    return EXIT_DONE if study.selection() is not None else EXIT_NO_RESULT


def _measure(
    study: Study,
    report: Report,
    channel: Channel,
    console: Console,
    deadline: Deadline,
    connection: Connection,
    cache: TokenCache | None,
) -> StudyDriver:
    """Run the trials until the study or the time is over."""
    closing = min(_CLOSING_SECONDS, _CLOSING_SHARE * report.budget_seconds)
    driver = StudyDriver(
        study=study,
        study_id=report.study_id,
        config=report.config,
        cache=cache,
        out=report.out,
        deadline=deadline.earlier_by(closing),
        publish=lambda record: channel.send("record", record=record.model_dump(mode="json")),
    )
    title = f"{report.facts['preset_size']}, {report.config.training.tokens_per_update:,} targets an update"
    storage = Path(tempfile.mkdtemp(prefix="tinyllm_ray-tune-"))
    try:
        with open_display(console, lambda: View(title, driver.rows(), deadline.remaining())) as display:

            def changed(row: Row) -> None:
                report.write(driver, ended=None)
                if study.selection() is not None:
                    channel.send("standing", exit_status=EXIT_DONE)
                display.show(row)

            driver.changed = changed
            run_trials(driver, connection, logs=report.out / CANDIDATES, storage=storage)
    except Interrupted as interruption:
        driver.end = str(interruption)
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    return driver


def _open_tokens(config: Config, fitted: FittedSpace) -> TokenCache | None:
    """The token cache that trials read, the default one built if need be; None where they read none."""
    if fitted.protocol.data_mode == "synthetic":
        return None
    return open_cache(config.data.cache or default_cache())


def _facts(
    definition: Definition, fitted: FittedSpace, connection: Connection, cache: TokenCache | None
) -> dict[str, Any]:
    return {
        "preset_size": f"{fitted.parameters / 1e6:.1f}M parameters",
        "recipe_identity": definition.recipe_identity,
        "cache_identity": cache.identity if cache else None,
        "space": fitted.name,
        "space_notes": list(fitted.notes),
        "protocol": fitted.protocol.model_dump(),
        "device_kind": fitted.device_kind,
        "nodes": connection.nodes,
        "gpus": connection.gpus,
        "cores_per_node": connection.cores_per_node,
        "ray_started_here": connection.started,
    }


def _describe(connection: Connection) -> str:
    devices = f"{connection.gpus} GPUs" if connection.gpus else f"{connection.cores_per_node} cores a node, no GPU"
    origin = "started" if connection.started else "joined"
    page = f"; dashboard {connection.dashboard}" if connection.dashboard else ""
    return f"Ray {origin} at {connection.address}: {connection.nodes} node(s), {devices}{page}"


def _shortest(path: Path) -> Path:
    """`path` as a person would write it: relative where that is shorter."""
    relative = Path(os.path.relpath(path))
    return min(relative, path, key=lambda form: len(str(form)))
