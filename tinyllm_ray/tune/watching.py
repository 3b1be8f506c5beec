"""What others see of a running study while it goes: Ray's metrics, and Ray Tune's callbacks."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinyllm_ray.records import Fate
from tinyllm_ray.search.answers import State
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import CALLBACKS
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.report import Report

if TYPE_CHECKING:
    from tinyllm_ray.cluster.metrics import Standing

_FATES = frozenset(fate.value for fate in Fate)


@contextmanager
def watched(driver: StudyDriver, report: Report, callbacks: Sequence[Any], console: Console) -> Iterator[list[Any]]:
    """Export the study's metrics, and give the callbacks that Tune is to have; neither can end the study."""
    from tinyllm_ray.cluster.callbacks import guarded
    from tinyllm_ray.cluster.metrics import exporting

    tell = functools.partial(say, console)
    with (
        exporting(
            report.study_id,
            lambda: standing(driver, report),
            lambda why: tell(f"metrics are not exported any more: {why}"),
        ),
        guarded(
            callbacks, report.out / CALLBACKS, driver.record, tell, seconds_left=lambda: driver.seconds_left
        ) as guards,
    ):
        yield guards


def standing(driver: StudyDriver, report: Report) -> "Standing":
    """The study as its rows have it since the last event; takes no lock."""
    from tinyllm_ray.cluster.metrics import Standing
    from tinyllm_ray.cluster.names import trial_name

    rows, model = driver.shown, report.config.model.model_dump(mode="json")
    rates = {row.label: row.targets_per_second for row in rows if row.targets_per_second}
    baselines = (
        row.targets_per_second / row.versus_baseline for row in rows if row.targets_per_second and row.versus_baseline
    )
    return Standing(
        best_targets_per_second=max((rates[row.label] for row in rows if row.state == Fate.COMPLETE), default=None),
        baseline_targets_per_second=next(baselines, None),
        budget_left_seconds=max(0.0, driver.seconds_left),
        budget_seconds=report.budget_seconds,
        running=frozenset(trial_name(model, row.label) for row in rows if row.state == State.RUNNING),
        candidates={trial_name(model, label): rate for label, rate in rates.items()},
        trials=Counter(row.state for row in rows if row.state in _FATES),
    )
