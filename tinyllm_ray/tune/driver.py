"""Between the study, which decides, and the trials, which measure: requests out, events and records in."""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config, identity
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.records import Fate, Purpose, TrialRecord
from tinyllm_ray.search.answers import CandidateStatus, Finished, State, Trial
from tinyllm_ray.search.judgement import judged
from tinyllm_ray.search.noise import device_name
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.outcome import RunningCandidate, build_record
from tinyllm_ray.train.recipe import learning_rate_sum
from tinyllm_ray.train.trial_request import TrialRequest
from tinyllm_ray.tune.late_files import LateFiles
from tinyllm_ray.tune.table import Row

_LEAST_LIMIT_SECONDS = 120.0
_LIMIT_OVER_UPPER = 3.0
"""A candidate may take this many times its upper prediction before it counts as hung, within what the budget has."""

_STAGES_WITH_PARITY = frozenset({"baseline", "verification", "repeat"})
"""Whose trials are compared with the float32 reference: what the others are compared with, and what may win."""

_PURPOSES: Mapping[str, Purpose] = {"control": "control", "verification": "verification", "repeat": "repeat"}
"""Of stages; every other one's is search."""


class StudyDriver:
    """Runs one study's decisions; a `cluster.searcher.Driver`.

    `publish` is given every record once, before anything else hears of it; `changed` hears of every candidate that
    has started or ended; `earlier` are the records of the study that this one goes on with. Its methods may be called
    from several threads: Tune's loop, a display, a signal's end.
    """

    def __init__(
        self,
        study: Study,
        study_id: str,
        config: Config,
        cache: TokenCache | None,
        out: Path,
        deadline: Deadline,
        publish: Callable[[TrialRecord], None] = lambda record: None,
        changed: Callable[[Row], None] = lambda row: None,
        earlier: Iterable[TrialRecord] = (),
    ) -> None:
        self.study = study
        self.publish = publish
        self.changed = changed
        self.end: str | None = None
        """Why the study asks for nothing any more."""
        self.budget_exhausted = False
        """Whether candidates were left out for want of time."""
        self._study_id = study_id
        self._config = config
        self._cache = cache
        self._files = LateFiles(out)
        self._deadline = deadline
        self.shown: Sequence[Row] = ()
        """The rows as of the last event, for a display: it holds a lock of its own, and must not wait for this one."""
        self._running: dict[str, RunningCandidate] = {}
        self._records = list(earlier)
        self._freed: str | None = None
        """The device whose trial has just ended."""
        self._places: dict[str, str] = {}
        """By device, what the cluster calls the place where it is."""
        self._compared: set[str] = set()
        """Executions, by identity, that this session has found equal to the float32 reference."""
        self._learning_rates = functools.cache(functools.partial(learning_rate_sum, config))
        self._interrupted = False
        self._lock = threading.RLock()

    @property
    def records(self) -> Sequence[TrialRecord]:
        """All of the study, those of earlier sessions first."""
        return self._records

    @property
    def seconds_left(self) -> float:
        """For measuring."""
        return self._deadline.remaining()

    def stop(self, end: str | None, *, interrupted: bool = False) -> None:
        """Ask for nothing and hear of nothing from here on; `interrupted` is what becomes of running candidates."""
        with self._lock:
            self.end = self.end or end
            self._interrupted = interrupted
            self._running.clear()
            self._files.catch_up()

    @property
    def finished(self) -> bool:
        return self.end is not None

    def ask(self) -> Mapping[str, Any] | None:
        with self._lock:
            if self.finished:
                return None
            left = self._deadline.remaining()
            answer = self.study.ask(left, self._freed)
            self._freed = None
            if isinstance(answer, Finished):
                self.end, self.budget_exhausted = answer.reason, answer.budget_exhausted
                return None
            if not isinstance(answer, Trial):
                return None
            request = self._request(answer, left)
            self._running[answer.candidate.id] = RunningCandidate(
                request, Deadline.after(request["limit_seconds"]), time.monotonic(), time.time()
            )
            self._show(answer.candidate.id)
            return request

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        with self._lock:
            running = self._running.get(candidate)
            if running is None:
                return  # Tune repeats a trial's last result when it completes
            if event["event"] == "record":
                self._end(candidate, TrialRecord.model_validate(event["record"]), event.get("place"))
            else:
                running.hear(event)
                # Only its own row changes; the others' predictions would be made anew for nothing.
                self.shown = [
                    replace(row, detail=_stage(running)) if row.candidate == candidate else row for row in self.shown
                ]

    def lose(self, candidate: str) -> None:
        with self._lock:
            running = self._running.get(candidate)
            if running is None:
                return
            source = source_identity()
            record = build_record(
                running,
                Fate.LOST,
                f"its Ray process or node went away during {running.stage}",
                time.monotonic() - running.began,
                environment={},
                source={"sha256": source.sha256, "dirty": source.dirty},
                compile_cache=None,
            )
            self._end(candidate, record)

    def record(self, candidate: str) -> TrialRecord | None:
        """The candidate's last record, as it was judged; None where it has none."""
        with self._lock:
            return next((record for record in reversed(self._records) if record.candidate == candidate), None)

    def rows(self) -> list[Row]:
        """Every candidate the study knows, as shown to people."""
        with self._lock:
            return [self._row(candidate) for candidate in self.study.candidates()]

    def row(self, candidate_id: str) -> Row:
        return next(row for row in self.rows() if row.candidate == candidate_id)

    def _end(self, candidate: str, record: TrialRecord, place: str | None = None) -> None:
        del self._running[candidate]
        # A lost one's device may be gone with its node.
        self._freed = device_name(record) if record.devices and record.fate != Fate.LOST else None
        if self._freed and place:
            self._places[self._freed] = place
        record = judged(record, self._records, identity(self.study.space.baseline), self._learning_rates)
        self._records.append(record)
        if record.fate == Fate.COMPLETE and record.proof and record.proof.parity:
            self._compared.add(record.execution_identity)
        self.publish(record)
        self.study.tell(record)
        self._show(candidate)

    def _show(self, candidate: str) -> None:
        self.shown = self.rows()
        self.changed(next(row for row in self.shown if row.candidate == candidate))

    def _request(self, trial: Trial, left: float) -> dict[str, Any]:
        candidate = trial.candidate
        config = self._config.with_execution(candidate.execution)
        path = Path("candidates") / f"{candidate.id}.yaml"
        self._files.write(path, config.to_yaml().encode())
        protocol = trial.protocol or self.study.protocol
        limit = max(_LEAST_LIMIT_SECONDS, _LIMIT_OVER_UPPER * trial.prediction.upper_seconds)
        request = TrialRequest(
            study=self._study_id,
            candidate=candidate.id,
            label=candidate.label,
            config=config.model_dump(mode="json"),
            protocol=protocol,
            purpose=_PURPOSES.get(trial.stage, "search"),
            round=trial.round,
            bar=self.study.bar(trial),
            cache=str(self._cache.folder) if self._cache else None,
            cache_identity=self._cache.identity if self._cache else None,
            configuration=str(path),
            device_kind=self.study.space.device_kind,
            parity=self._needs_parity(trial),
            limit_seconds=min(limit, left),
        )
        place = self._places.get(trial.device) if trial.device else None
        return {**request.model_dump(mode="json"), "place": place}

    def _needs_parity(self, trial: Trial) -> bool:
        """Once a session for what may win: its later processes are held to the baseline's trajectory, as the search's
        are, and spare the 0.6 s of an H200 that the reference takes. The baseline has nothing else to be held to."""
        name = trial.candidate.execution_identity
        if trial.stage == "verification" and name != identity(self.study.space.baseline):
            return name not in self._compared
        return trial.stage in _STAGES_WITH_PARITY

    def _row(self, status: CandidateStatus) -> Row:
        record = status.record
        cut = self._interrupted and status.state == State.RUNNING
        running = self._running.get(status.candidate.id)
        return Row(
            candidate=status.candidate.id,
            label=status.candidate.label,
            state="interrupted" if cut else (status.fate or status.state).value,
            detail=_stage(running) if running else status.reason or "",
            targets_per_second=record.targets_per_second if record else None,
            versus_baseline=self.study.versus_baseline(record),
            seconds=record.seconds.total if record else None,
            compile_seconds=record.seconds.compile if record else None,
        )


def _stage(running: RunningCandidate) -> str:
    return running.stage if running.stage == "proof" or not running.windows else f"window {len(running.windows) + 1}"
