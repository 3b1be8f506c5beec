"""The tuner as a Python object: the same supervised study that the command line runs."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm_ray.allocation import within_allocation
from tinyllm_ray.clock import Deadline, parse_duration
from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import (
    EXIT_DONE,
    EXIT_NO_RESULT,
    EXIT_SIGINT,
    EXIT_USER,
    ConfigError,
    NoResultError,
    TinyllmRayError,
)
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.search.objective import ObjectiveKind
from tinyllm_ray.search.space import SearchWindows, Space
from tinyllm_ray.summary import SUMMARY, read_summary
from tinyllm_ray.table import table_row
from tinyllm_ray.tune.budget import seconds_left
from tinyllm_ray.tune.channel import STUDY_COMMAND
from tinyllm_ray.tune.folder import SELECTED, TRIALS
from tinyllm_ray.tune.page.maker import bring_up_to_date
from tinyllm_ray.tune.preset_names import study_folders
from tinyllm_ray.tune.request import PLANNED_RUNS, StudyRequest, check_request, request_of
from tinyllm_ray.tune.several_folder import read_whole, refuse_several
from tinyllm_ray.tune.supervisor import supervise

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class TuneResult:
    """What a study left; everything can be read again from `out` with `TuneResult.read`.

    >>> from tinyllm_ray.tune import TuneResult
    >>> result = TuneResult.read("studies/nano")
    >>> result.selected in result.records, result.speedup >= 1
    (True, True)
    >>> table = result.to_pandas()
    >>> list(table[["candidate", "fate", "update", "targets_per_second"]].iloc[0])[1:3]
    ['complete', 'eager']
    """

    out: Path
    summary: dict[str, Any]
    """The content of `summary.json`."""
    records: tuple[TrialRecord, ...]
    """Every trial, in the order they ended."""
    config: Config
    """The selected configuration."""

    @classmethod
    def read(cls, out: str | Path) -> "TuneResult":
        """The result of the study in `out`.

        Raises ConfigError where there is none, NoResultError without a verdict, TinyllmRayError where it is damaged.
        """
        folder = Path(out)
        refuse_several(folder)
        summary = read_summary(folder)
        if not summary:
            raise ConfigError(f"{folder}: there is no study here ({SUMMARY} is missing)")
        if summary["selected"] is None:
            raise NoResultError(f"{folder}: no candidate gave a figure that can be believed; see {SUMMARY}")
        records = tuple(read_records(folder / TRIALS))
        return cls(folder, summary, records, load(folder / SELECTED))

    @property
    def baseline(self) -> TrialRecord | None:
        """The record every other is compared with; None where it has none."""
        return self._record(self.summary["baseline"])

    @property
    def selected(self) -> TrialRecord:
        """The record of the selected configuration."""
        record = self._record(self.summary["selected"])
        assert record is not None
        return record

    @property
    def speedup(self) -> float | None:
        """Throughput of the selected configuration over the baseline's: verified in pairs of processes where there was
        time for that (`summary["speedup"]` has the interval), else as the search measured both."""
        speedup: dict[str, Any] | None = self.summary["speedup"]
        return speedup["ratio"] if speedup else None

    def to_pandas(self) -> "pandas.DataFrame":
        """A row a trial, with the columns of `tinyllm_ray.table.table_row`."""
        import pandas

        return pandas.DataFrame([table_row(record) for record in self.records])

    def _record(self, figures: dict[str, Any] | None) -> TrialRecord | None:
        """The last record of a candidate, which is the one that counts after a resumption."""
        if figures is None:
            return None
        return next(record for record in reversed(self.records) if record.candidate == figures["candidate"])


class Tuner:
    """Finds the fastest execution of a recipe within a time budget.

    >>> from tinyllm_ray.tune import Space, Tuner
    >>> short = {"warmup_updates": 1, "windows": 2, "updates_per_window": 2}
    >>> space = Space(baseline={}, factors={"sdpa_backend": ["auto", "math"]}, protocol=short)
    >>> tuner = Tuner(preset="nano", space=space, budget="10m", runs=1, out="studies/nano")  # one training is planned
    >>> result = tuner.fit()
    >>> result.selected.fate.value, result.config.execution.sdpa_backend in space.factors["sdpa_backend"]
    ('complete', True)
    """

    def __init__(
        self,
        *,
        budget: str,
        out: str | Path,
        preset: str | None = None,
        config: Config | str | Path | None = None,
        overrides: Sequence[str] = (),
        space: Space | str | Path | None = None,
        protocol: dict[str, Any] | None = None,
        search_windows: SearchWindows | None = None,
        objective: ObjectiveKind = "training",
        runs: int = PLANNED_RUNS,
        resume: bool = False,
        retry: Sequence[str] = (),
        address: str | None = None,
        by_device: str | None = None,
        callbacks: Sequence[Any] | None = None,
        decisions: str | Path | None = None,
    ) -> None:
        """Everything is checked here, the machine's part in `fit`. Raises ConfigError.

        Args:
            budget: wall clock from the call of `fit` to its return, like "45m"; less in a Slurm job that ends sooner.
            out: folder of the study; new or empty, unless `resume`.
            preset: the recipe by name; or `config`: a Config, or a YAML file. Neither: what fits the machine.
            overrides: `section.key=value`, applied to a preset or file.
            space: a Space, a shipped space's name or a YAML file. None: what fits the machine.
            protocol: fields of the space's protocol to replace, like {"windows": 5}.
            search_windows: "by_count" times what the search tries as it times baseline and finalists; "by_need", which
                is every space's own unless it says otherwise, as long as need be. None: the space's.
            objective: "training" for the least seconds of all planned trainings, "throughput" for most targets/s.
            runs: trainings planned with the answer; the search ends when it costs more than it saves over them.
            retry: with `resume`, fates like "failed" to measure again; lost and timed-out candidates always are.
            address: Ray cluster to join; None: $RAY_ADDRESS, else a local one is started.
            by_device: the one model of GPU to study, like "H200", on a cluster of several, which no study mixes.
            callbacks: Ray Tune's, like `[WandbLoggerCallback(project="tiny")]`, which run in the study's process and
                hear of every window and record; None writes TensorBoard's event files to `out`/callbacks, [] nothing.
            decisions: decision file that the answer is added to.
        """
        if preset is not None and config is not None:
            raise ConfigError("preset and config both name a recipe; give one of them")
        if isinstance(overrides, str):
            raise ConfigError(f"overrides: {overrides!r} is one text; give a list, like [{overrides!r}]")
        if not str(out):
            raise ConfigError("out: '' names no folder; give one, like \"studies/20m\"")
        seconds = parse_duration(budget, "budget")
        self.request = request_of(
            budget=budget,
            budget_seconds=seconds,
            total_seconds=seconds,
            age_seconds=0.0,
            recipe=preset if config is None else _plain(config),
            overrides=list(overrides),
            space=None if space is None else _plain(space),
            protocol=protocol or {},
            search_windows=search_windows,
            objective=objective,
            runs=runs,
            out=str(out),
            resume=resume,
            retry=list(retry),
            address=address or os.environ.get("RAY_ADDRESS") or None,
            by_device=by_device,
            callbacks=None if callbacks is None else _packed(callbacks),
            decisions=[] if decisions is None else [Path(decisions)],
        )
        check_request(self.request)

    def fit(self) -> TuneResult:
        """Run the study; returns before the budget is over.

        Raises ConfigError for what turns out not to fit the machine or the folder, NoResultError when nothing was
        measured that can be believed, KeyboardInterrupt after Ctrl-C (the folder then holds what was measured).
        """
        _fit(self.request)
        return TuneResult.read(self.request.out)


def tune_presets(presets: Sequence[str], **settings: Any) -> dict[str, TuneResult]:
    """Studies of several recipes within one budget, each beginning with what the earlier ones showed.

    `settings` are Tuner's, without preset and config; `presets` are names or YAML files, the quickest to measure first.
    The result has those that came to an answer, by the name of their folder in `out`, which also holds the decision
    file of all. Raises as Tuner and its `fit` do, NoResultError where none came to an answer.

    >>> from pathlib import Path
    >>> from tinyllm_ray.tune import Space, tune_presets
    >>> _ = Path("wide.yaml").write_text("{preset: nano, model: {width: 96}}")
    >>> short = {"warmup_updates": 1, "windows": 2, "updates_per_window": 2}
    >>> space = Space(baseline={}, factors={"sdpa_backend": ["auto", "math"]}, protocol=short)
    >>> results = tune_presets(["nano", "wide.yaml"], space=space, budget="20m", runs=1, out="studies/sizes")
    >>> list(results), results["wide"].config.model.width
    (['nano', 'wide'], 96)
    """
    if isinstance(presets, str) or not presets:
        raise ConfigError(f'presets: {presets!r} is no list of recipes; give some, like ["20m", "50m"]')
    request = [Tuner(preset=preset, **settings).request for preset in presets][-1]
    _fit(request.model_copy(update={"recipe": None, "presets": list(presets)}))
    studies = read_whole(Path(request.out))["studies"]
    answered = [one["name"] for one in studies if one["selected"]]
    return {name: TuneResult.read(Path(request.out) / name) for name in answered}


def _fit(request: StudyRequest) -> None:
    """Run what is requested, under a supervisor; returns where there is an answer that can be read."""
    out, began = Path(request.out), time.monotonic()
    left = seconds_left(request.total_seconds, out, request.resume) + began - time.monotonic()
    deadline = within_allocation(Deadline.after(left), os.environ)
    values = request.model_dump(mode="json", exclude={"budget_seconds"})
    values["age_seconds"] = time.monotonic() - began
    outcome = supervise(STUDY_COMMAND, request=values, deadline=deadline)
    if outcome.mirrored:  # the folder is this study's, and its file system answers
        for folder in study_folders(out, request.presets):
            bring_up_to_date(folder, deadline)
    if outcome.exit_status == EXIT_DONE and outcome.mirrored:
        return
    if outcome.exit_status == EXIT_DONE:  # reading it might hang, too
        raise TinyllmRayError(f"{request.out} cannot be read; every record is in {outcome.journal}")
    message = outcome.message or f"the study ended with status {outcome.exit_status}"
    if outcome.exit_status == EXIT_USER:
        raise ConfigError(message)
    if outcome.exit_status == EXIT_NO_RESULT:
        where = f"{out / SUMMARY} says what happened to each"
        raise NoResultError(outcome.message or f"no candidate gave a figure that can be believed: {where}")
    if outcome.exit_status == EXIT_SIGINT:
        raise KeyboardInterrupt(message)
    raise TinyllmRayError(message)


def _plain(given: Config | Space | str | Path) -> dict[str, Any] | str:
    """As a request has it: the values of what is whole, the name of what is to be read."""
    return given.model_dump(mode="json") if isinstance(given, Config | Space) else str(given)


def _packed(callbacks: Sequence[Any]) -> dict[str, Any]:
    from tinyllm_ray.cluster.callbacks import pack_callbacks  # which imports Ray, and only they need it

    return pack_callbacks(callbacks)
