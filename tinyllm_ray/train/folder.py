"""A run's folder: taken when it is new or empty, gone on with when asked to, and told of an end before the start."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError


def prepare_folder(out: Path, resume: bool = False) -> None:
    """Make the run's folder.

    Raises ConfigError where it cannot be made, where it holds something and `resume` is False, and where with
    `resume` it holds something else than a run.
    """
    with _writable(out):
        out.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in out.iterdir()}
    if names and not names & {"config.yaml", "result.json", "train.log"}:
        raise ConfigError(f"--out {out}: the folder is not empty; choose another or remove it")
    if names and not resume:
        raise ConfigError(f"--out {out}: the folder holds a run; go on with it by --resume, or choose another folder")


def begin_log(out: Path) -> None:
    """Have the process log into the run's train.log. Raises ConfigError where that cannot be written."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    with _writable(out):
        logging.basicConfig(filename=out / "train.log", level=logging.INFO, format=line)


def write_configuration(out: Path, configuration: str) -> None:
    """Write the run's config.yaml. Raises ConfigError where that cannot be done."""
    with _writable(out):
        journal.write_atomically(out / "config.yaml", configuration.encode())


@contextlib.contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be written") from None


def read_result(out: Path) -> dict[str, Any]:
    """What result.json holds; empty where there is none that can be read."""
    try:
        result = json.loads((out / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def bring_curves(run: Path, out: Path) -> None:
    """Copy what another run's folder recorded, which a run that goes on from there starts with."""
    for name in ("metrics.jsonl", "evaluations.jsonl", "best.json"):
        if (run / name).exists() and not (out / name).exists():
            shutil.copyfile(run / name, out / name)


def leave_before_start(out: Path, resume: bool, number: int) -> None:
    """Have result.json say that a signal came before anything was done; a folder that is not the run's stays as it is.

    An earlier session's figures stay beside the status.
    """
    with contextlib.suppress(ConfigError, OSError):  # the process ends right after, by a signal, and says so
        prepare_folder(out, resume)
        result = {"step": 0, **read_result(out), "status": "interrupted", "signal": number, "stage": "start"}
        if result.get("validation") is None:  # a run that is complete stays so
            journal.write_atomically(out / "result.json", (json.dumps(result, indent=2) + "\n").encode())
