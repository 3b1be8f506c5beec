"""The folder of studies that share one budget: which they are, how each stands, and the page that lists them.

OUT/presets.yaml     what shares the budget; written first
OUT/20m/ ...         a whole study folder each, which can be resumed and reported on by itself
OUT/decisions.yaml   the decision file of all of them
OUT/summary.json     how each stands, and what of the budget is used
OUT/index.html       the same for people
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.paths import is_there
from tinyllm_ray.records import SCHEMA_VERSION
from tinyllm_ray.summary import SUMMARY, find_summary, read_summary
from tinyllm_ray.tune.claim import claim
from tinyllm_ray.tune.folder import DEFINITION, check_vacant
from tinyllm_ray.tune.preset_names import folder_name, study_folders
from tinyllm_ray.tune.sessions import SESSIONS
from tinyllm_ray.yamlfile import dump_yaml, read_mapping

PRESETS = "presets.yaml"
INDEX = "index.html"

State = Literal["waiting", "running", "done", "short", "interrupted", "left out"]
"""done: nothing more was worth measuring; short: its share was over; left out: it cannot be studied here."""


@dataclass
class Standing:
    """How one of the studies stands."""

    name: str
    state: State = "waiting"
    reason: str | None = None
    """Why, where it is not running or waiting."""
    seconds: float = 0.0
    """Its share of the budget, once it has begun; with what earlier sessions gave it."""


def open_whole(out: Path, presets: Sequence[str], resume: bool) -> list[Standing]:
    """How the studies of `presets` stand, from earlier sessions where this resumes. Nothing is written.

    With `resume` they begin where there are none yet: one command for a job that comes back.
    Raises ConfigError where the folder is another's, or `presets` are not those it began with.
    """
    names = [folder_name(preset) for preset in presets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--presets: {twice[0]} is there twice; each is studied once")
    if kept := [name for name in names if name in (".", SESSIONS)]:
        raise ConfigError(f"--presets: a folder in --out cannot be called {kept[0]!r}; rename the recipe's file")
    file = out / PRESETS
    if not is_there(file, "--out"):
        _check_free(out)
        return [Standing(name) for name in names]
    if not resume:
        raise ConfigError(f"--out {out}: the folder already holds studies; add --resume to go on, or choose another")
    claim(file)
    known = read_mapping(file).get("presets")
    if known != list(presets):
        before = ",".join(map(str, known)) if isinstance(known, list) else known
        raise ConfigError(f"--resume: the presets are {','.join(presets)}, were {before}; ask for the same")
    earlier = {one["name"]: one for one in read_whole(out).get("studies", ())}
    return [_stood(name, earlier.get(name)) for name in names]


def _check_free(out: Path) -> None:
    if (out / DEFINITION).exists():
        raise ConfigError(f"--out {out}: the folder holds one study; name its recipe with --preset, or choose another")
    check_vacant(out)


def _stood(name: str, before: Mapping[str, Any] | None) -> Standing:
    """A study of an earlier session: what was left out may fit now, and what ran was cut."""
    if before is None or before["state"] in ("waiting", "left out"):
        return Standing(name)
    state: State = before["state"] if before["state"] in ("done", "short") else "interrupted"
    return Standing(name, state, before["reason"], before["seconds"])


def begin_whole(out: Path, presets: Sequence[str]) -> None:
    """Make the folder, say what it is of, and hold it. Raises ConfigError where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            journal.write_first(out / PRESETS, dump_yaml({"presets": list(presets)}).encode())
        claim(out / PRESETS)
        journal.remove_torn(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be written") from None


def refuse_several(out: Path) -> None:
    """Raises ConfigError where `out` is the folder of studies that share a budget, and one of them is wanted."""
    if (out / PRESETS).is_file():
        names = ", ".join(str(folder) for folder in begun_studies(out)) or "none has begun yet"
        raise ConfigError(f"{out}: several studies lie here; name one of them: {names}")


def read_whole(out: Path) -> dict[str, Any]:
    """The summary of all studies, empty where there is none yet. Raises TinyllmRayError where it is damaged."""
    summary = read_summary(out)
    if summary and not isinstance(summary.get("studies"), list):
        raise ConfigError(f"{out / SUMMARY}: this is no summary of several studies")
    return summary


def begun_studies(out: Path) -> list[Path]:
    """Folders of the studies that have begun. Raises ConfigError where the file that lists them is damaged."""
    presets = read_mapping(out / PRESETS).get("presets")
    if not isinstance(presets, list) or not all(isinstance(one, str) for one in presets):
        raise ConfigError(f"{out / PRESETS}: damaged: it holds no list of presets")
    folders = study_folders(out, presets)
    return [folder for folder in folders if (folder / DEFINITION).exists()]


def write_whole(
    out: Path,
    standings: Sequence[Standing],
    budget_seconds: float,
    sessions: Sequence[Mapping[str, Any]],
    ended: str | None,
) -> dict[str, Any]:
    """Write how all studies stand, with what each one's own summary says; returns what was written. Raises OSError.

    `sessions` are what each used of the budget, as `sessions.with_reported` has them, this one last.
    """
    summary = {
        "schema_version": SCHEMA_VERSION,
        "budget_seconds": budget_seconds,
        "elapsed_seconds": sum(entry["seconds"] for entry in sessions),
        "sessions": list(sessions),
        "timestamp": time.time(),
        "ended": ended,
        "studies": [asdict(one) | study_figures(out / one.name) for one in standings],
    }
    journal.write_atomically(out / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    return summary


def study_figures(folder: Path) -> dict[str, Any]:
    """What a study's own summary says of its answer; every figure None where it has none."""
    summary = find_summary(folder)
    selected, baseline = summary.get("selected") or {}, summary.get("baseline") or {}
    labels = {row["candidate"]: row["label"] for row in summary.get("candidates", ())}
    measured = [row for row in summary.get("candidates", ()) if row["seconds"] is not None]
    return {
        "study": summary.get("study"),
        "parameters": summary.get("parameters"),
        "targets_per_update": summary.get("targets_per_update"),
        "selected": labels.get(selected.get("candidate")),
        "targets_per_second": selected.get("targets_per_second"),
        "baseline_selected": bool(selected) and selected.get("candidate") == baseline.get("candidate"),
        "speedup": summary.get("speedup"),
        "trials": len(measured),
        "elapsed_seconds": summary.get("elapsed_seconds"),
        "ended": summary.get("ended"),
        "budget_exhausted": bool(summary.get("budget_exhausted")),
    }
