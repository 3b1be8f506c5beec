"""One candidate of a study measured again, as the study measured it, in a process of its own."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.gpu_models import refuse_mixture
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.paired import RESERVED_SHARE, PairedVerifier
from tinyllm_ray.search.repeat import Repeat
from tinyllm_ray.search.ruled_out import RAN
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.show import PipeConsole
from tinyllm_ray.tune.again.recorded import (
    RecordedStudy,
    changes_since,
    device_changes,
    held_to_kind_of,
    measured_on,
    open_study,
)
from tinyllm_ray.tune.again.request import RerunRequest
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.page.maker import PAGE, PageMaker
from tinyllm_ray.tune.report import Report, shortest_path
from tinyllm_ray.tune.session import Session
from tinyllm_ray.tune.study_run import claim_machine, closing_seconds, measure, open_tokens, study_facts
from tinyllm_ray.tune.supervisor import process_age_seconds

if TYPE_CHECKING:
    from tinyllm_ray.cluster.connect import Connection
    from tinyllm_ray.tune.study_process import Work


def run(work: "Work") -> int:
    """Measure the candidate that `work` was asked for; returns the exit status.

    Raises ConfigError where there is no such study or candidate, where another process measures for the study, and
    where source, tokens, versions or device are not the study's.
    """
    request = RerunRequest.model_validate(work.channel.request)
    deadline = Deadline.after(request.budget_seconds - process_age_seconds())
    study = open_study(Path(request.out).resolve())
    record = study.record_of(request.candidate)
    space = study.space("cpu", usable_cores())
    cache = open_tokens(study.config, space)
    _refuse(study, changes_since(study.reference, cache.identity if cache else None))
    compile_cache_folder()
    return _run_on_ray(request, study, record, space, cache, work, deadline)


def _run_on_ray(
    request: RerunRequest,
    study: RecordedStudy,
    record: TrialRecord,
    space: FittedSpace,
    cache: TokenCache | None,
    work: "Work",
    deadline: Deadline,
) -> int:
    from tinyllm_ray.cluster.connect import connect

    console = PipeConsole(stderr=True)
    say(console, f"{record.candidate} again, within {request.budget}; starting Ray")
    with connect(request.address) as cluster, claim_machine(console, cluster):
        connection = held_to_kind_of(measured_on(study.records), cluster)
        fitted = _on_these_devices(study, record, space, connection)
        known = study.earlier.definition
        work.channel.send("out", study=known.study, path=str(study.out))
        verifier = PairedVerifier(fitted.protocol, RESERVED_SHARE * study.budget_seconds, study.objective)
        repeat = Repeat(fitted, study.records, record.execution_identity, study.objective, verifier)
        driver = StudyDriver(
            study=repeat,
            study_id=known.study,
            config=study.config,
            cache=cache,
            out=study.out,
            deadline=deadline.earlier_by(closing_seconds(request.total_seconds)),
            earlier=study.records,
        )
        report = RerunReport(
            out=study.out,
            study_id=known.study,
            config=study.config,
            budget_seconds=study.budget_seconds,
            elapsed=lambda: study.earlier.spent_seconds + request.age_seconds + process_age_seconds(),
            facts={**study_facts(known, fitted, connection, cache), **study.summary},
            earlier_sessions=study.earlier.sessions,
            page=PageMaker(study.out, functools.partial(say, console)),
            study=study,
            repeat=repeat,
        )
        session = work.session = Session(driver, report, work.channel, console)
        lost = measure(driver, report, connection, cache, nullcontext([]))
        status = session.close(driver.end or lost)
    session.settle()
    return status


def _on_these_devices(
    study: RecordedStudy, record: TrialRecord, space: FittedSpace, connection: "Connection"
) -> FittedSpace:
    """The study's space where trials run as they did. Raises ConfigError where they would not."""
    from tinyllm_ray.cluster.trials import resources

    cores, was = int(resources(connection)["CPU"]), measured_on(study.records)
    changes = device_changes(was, connection.device_kind, connection.started, connection.accelerators)
    threads = record.execution["cpu_threads"]
    if threads is not None and threads > cores:
        changes.append(f"a trial has {cores} CPU cores, and the candidate {threads} threads")
    _refuse(study, changes)
    refuse_mixture(connection.accelerators, "the study tells of no device, so join a cluster of its kind alone")
    return replace(space, device_kind=connection.device_kind, cores=cores)


def _refuse(study: RecordedStudy, changes: Sequence[str]) -> None:
    if changes:
        raise ConfigError(
            f"{study.out}: its candidates cannot be measured here as they were: {'; '.join(changes)}; "
            "`tune validate` asks whether the study's decision holds here all the same"
        )


@dataclass(kw_only=True)
class RerunReport(Report):
    """The study's summary and page with the new record in them; beside them, the two figures."""

    study: RecordedStudy
    repeat: Repeat

    def closing_lines(self, driver: StudyDriver) -> list[str]:
        """The candidate before and after, and whether the study's choice is another by it."""
        before, after = self.repeat.before, self.repeat.after
        lines = [f"before: {outcome_words(before)}"]
        if after is None:
            return [*lines, f"not measured again: {driver.end}"]
        lines.append(f"after:  {outcome_words(after)}")
        if (found := self.repeat.difference) is not None:
            lines.append(str(found))
            if not found.within_noise:
                lines.append("the machine was busy with something else, or is another now: `tune validate` tells")
        selection, told = driver.study.selection(), self.study.summary.get("selected")
        if selection is not None:
            same = told is not None and told["candidate"] == selection.record.candidate
            lines.append(f"the study selects {selection.record.candidate}{', as before' if same else ''}")
        return [*lines, f"report: {shortest_path(self.out / PAGE)}"]

    def exit_status(self, driver: StudyDriver) -> int:
        """Done where the candidate ran."""
        after = self.repeat.after
        return EXIT_DONE if after is not None and after.fate in RAN else EXIT_NO_RESULT

    def _summary(self, driver: StudyDriver) -> dict[str, Any]:
        """The study's own end stays; what the rerun takes is on top of its budget."""
        told, found = self.study.summary, super()._summary(driver)
        used = found["elapsed_seconds"] - self.study.earlier.spent_seconds
        return found | {
            "budget_seconds": self.budget_seconds + used,
            "budget_exhausted": told.get("budget_exhausted", False),
            "ended": (told.get("ended") or "cut before its end") if driver.finished else None,
        }


def outcome_words(record: TrialRecord) -> str:
    """What became of a trial, for people."""
    words = f"{record.candidate}: {record.fate.value.replace('_', ' ')}"
    if record.targets_per_second is not None:
        words += f", {record.targets_per_second:,.0f} targets/s"
    return f"{words}, {record.reason}" if record.reason else words
