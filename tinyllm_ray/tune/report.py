"""What a study leaves for people and programs: `selected.yaml`, `summary.json`, and the closing lines.

Both files are rewritten after every trial, so that they stand whenever the end comes.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.config import Config
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT
from tinyllm_ray.promise import CompiledFile
from tinyllm_ray.records import SCHEMA_VERSION, TrialRecord
from tinyllm_ray.search.study import Study
from tinyllm_ray.summary import SUMMARY
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import SELECTED
from tinyllm_ray.tune.page.maker import PAGE, PageMaker
from tinyllm_ray.tune.processes import STUDY_VARIABLE
from tinyllm_ray.tune.promise import build_promise, drop_compiled
from tinyllm_ray.tune.sessions import with_trials


@dataclass
class Report:
    """Everything the summary holds beside the study's own state."""

    out: Path
    study_id: str
    config: Config
    budget_seconds: float
    elapsed: Callable[[], float]
    """Seconds of the budget that are used up."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Recipe, space, machine and cluster, for the summary."""
    earlier_sessions: Sequence[Mapping[str, Any]] = ()
    """What sessions before this one used of the budget, as `budget.sessions_so_far` has them."""
    page: PageMaker | None = None
    """Makes the page for people, in a process of its own."""
    compiled: CompiledFile | None = None
    """What the selected execution compiled, as of the last `write`."""

    def write(self, driver: StudyDriver) -> None:
        """Rewrite both files, and have the page made. Raises OSError where they cannot be written."""
        selection = driver.study.selection()
        if selection is not None:
            selected = self.config.with_execution(selection.record.execution)
            promise = build_promise(driver.study, selection.record, selected, self.out)
            selected = selected.model_copy(update={"tuned": promise})
            self.compiled = promise.compiled if promise else None
            journal.write_atomically(self.out / SELECTED, selected.to_yaml().encode())
        summary = json.dumps(self._summary(driver), indent=2, allow_nan=False) + "\n"
        journal.write_atomically(self.out / SUMMARY, summary.encode())
        if self.page is not None:
            self.page.ask()

    def closing_lines(self, driver: StudyDriver) -> list[str]:
        """What is said last."""
        return closing_lines(driver, self.out)

    def exit_status(self, driver: StudyDriver) -> int:
        """What the whole comes to as it stands."""
        return EXIT_DONE if driver.study.selection() is not None else EXIT_NO_RESULT

    def finish(self) -> None:
        """Drop what nobody needs and have the last page made; 3 s at most, of what is kept free for the study's end."""
        drop_compiled(self.out, self.compiled)
        if self.page is not None:
            self.page.finish()

    def _sessions(self, driver: StudyDriver, elapsed_seconds: float) -> list[dict[str, Any]]:
        """What the budget went to by session, this one last; the seconds add up to `elapsed_seconds`."""
        seconds = elapsed_seconds - sum(entry["seconds"] for entry in self.earlier_sessions)
        began = time.time() - seconds
        own = {"session": os.environ.get(STUDY_VARIABLE), "began": began, "seconds": seconds, "ended": driver.finished}
        trials = ((record.timestamp, record.seconds.total) for record in driver.records)
        return with_trials([*self.earlier_sessions, own], trials)

    def _summary(self, driver: StudyDriver) -> dict[str, Any]:
        study, selection = driver.study, driver.study.selection()
        elapsed = self.elapsed()
        return {
            "schema_version": SCHEMA_VERSION,
            "study": self.study_id,
            **self.facts,
            "budget_seconds": self.budget_seconds,
            "elapsed_seconds": elapsed,
            "sessions": self._sessions(driver, elapsed),
            "timestamp": time.time(),
            "budget_exhausted": driver.budget_exhausted,
            "ended": driver.end,
            "baseline": _figures(study.baseline().record, study),
            "eager": _figures(study.eager_row().record, study),
            "selected": _figures(selection.record, study) if selection else None,
            "speedup": speedup(study),
            "verdict": selection.reason if selection else None,
            "objective": asdict(study.objective),
            "account": asdict(account) if (account := study.account()) else None,
            "winners": [
                {
                    "tokens": winner.tokens,
                    "candidate": winner.record.candidate,
                    "seconds": winner.seconds,
                    "baseline_seconds": winner.baseline_seconds,
                }
                for winner in study.winners()
            ],
            "verification": _verification(study),
            "devices": [asdict(one) for one in study.controls.speeds()],
            "ties": [record.candidate for record in selection.ties] if selection else [],
            "candidates": [asdict(row) for row in driver.rows()],
        }


def speedup(study: Study) -> dict[str, Any] | None:
    """Throughput of the selected execution over the baseline's, and how well that is known; None without either."""
    selection, verified = study.selection(), study.verified()
    if selection is None:
        return None
    if verified is not None and verified.speedup is not None:
        return {**asdict(verified.speedup), "verified": True}
    ratio = study.versus_baseline(selection.record)
    return None if ratio is None else {"ratio": ratio, "verified": False}


def closing_lines(driver: StudyDriver, out: Path) -> list[str]:
    """What the study came to, and the command that goes on from there."""
    out = shortest_path(out)
    selection = driver.study.selection()
    lines = [f"ended: {driver.end}"] if driver.end else []
    if selection is None:
        return [*lines, f"no candidate gave a figure that can be believed; {out / SUMMARY} says what happened to each"]
    best = selection.record
    label = driver.row(best.candidate).label
    lines.append(f"selected {label}: {best.targets_per_second:,.0f} targets/s{_beside_baseline(driver.study)}")
    lines.append(f"verdict: {selection.reason}")
    lines += [f"slow device: {one}" for one in driver.study.controls.speeds() if one.slow]
    if (out / PAGE).exists():
        lines.append(f"report: {out / PAGE}")
    selected, run = (shlex.quote(str(out / name)) for name in (SELECTED, "run"))
    lines.append(f"next: python -m tinyllm_ray.train --config {selected} --out {run}")
    return lines


def _beside_baseline(study: Study) -> str:
    found, selection = speedup(study), study.selection()
    if found is None or selection is None:
        return ""
    if selection.record.execution == study.space.baseline:
        return ", the baseline itself"
    if found["verified"]:
        return (
            f", {found['ratio']:.3f}x the baseline ({found['low']:.3f} to {found['high']:.3f} with 90%, "
            f"{found['pairs']} pairs of processes)"
        )
    return f", {found['ratio']:.2f}x the baseline in the search, not verified"


def _verification(study: Study) -> dict[str, Any] | None:
    verified = study.verified()
    if verified is None:
        return None
    return {
        "selected": verified.selected.candidate,
        "verdicts": {name: asdict(verdict) for name, verdict in verified.verdicts.items()},
        "ties": [record.candidate for record in verified.ties],
        "sustained_targets_per_second": verified.sustained_targets_per_second,
        "baseline_sustained_targets_per_second": verified.baseline_sustained_targets_per_second,
        "load_disagrees": verified.load_disagrees,
        "reason": verified.reason,
    }


def shortest_path(path: Path) -> Path:
    """`path` as a person would write it: relative to where they are, where that is shorter."""
    relative = Path(os.path.relpath(path))
    return min(relative, path, key=lambda form: len(str(form)))


def _figures(record: TrialRecord | None, study: Study) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "candidate": record.candidate,
        "fate": record.fate.value,
        "reason": record.reason,
        "execution": record.execution,
        "targets_per_second": record.targets_per_second,
        "spread": record.spread,
        "versus_baseline": study.versus_baseline(record),
        "first_update_seconds": record.first_update_seconds,
        "seconds": record.seconds.model_dump(),
        "memory": record.memory.model_dump(),
        "targets_per_joule": record.targets_per_joule,
        "throttled_windows": record.throttled_windows,
        "configuration": record.configuration,
    }
