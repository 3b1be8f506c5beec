"""What a run writes beside its checkpoints: metrics and evaluations as JSON lines, single JSON files, event files.

A full disk or a removed folder stops no training: lines wait in memory, and every later write tries again.
"""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.command import say
from tinyllm_ray.train.event_files import EventFiles
from tinyllm_ray.train.state import RunState
from tinyllm_ray.train.validation import Evaluated

log = logging.getLogger(__name__)


class Lines:
    """A JSON Lines file that grows; what cannot be written waits for the next time.

    Unlike the journal it does not wait for the disk: a crash of the machine costs the last lines, which a resumed run
    makes again.
    """

    def __init__(self, path: Path) -> None:
        self.waiting: list[str] = []
        self._path = path
        self._bytes = path.stat().st_size if path.exists() else 0
        """Size of the file as far as its lines are whole."""

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add objects and write all that wait. Raises OSError where that fails, and keeps them."""
        self.waiting += [json.dumps(entry, allow_nan=False) + "\n" for entry in entries]
        if not self.waiting:
            return
        data = "".join(self.waiting).encode()
        with self._path.open("ab") as file:
            # A disk that filled up on the way has left a part of a line; a file that is shorter is another one.
            self._bytes = file.truncate(min(self._bytes, file.tell()))
            file.write(data)
        self._bytes += len(data)
        self.waiting.clear()


def keep_lines(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Have a JSON Lines file end with `last_step`, where a resumed run goes on; its entries.

    Lines after it, which the interrupted run had written since its checkpoint, move to NAME.superseded.jsonl. A damaged
    file is kept as NAME.damaged.jsonl, and what can be read of it goes on: a curve is no reason to lose a run. Raises
    OSError.
    """
    entries, damaged = _read_lines(path)
    if damaged:
        log.warning("%s is damaged; it stays as %s", path, path.with_suffix(".damaged.jsonl"))
        shutil.copyfile(path, path.with_suffix(".damaged.jsonl"))
    later = [entry for entry in entries if entry["step"] > last_step]
    if later:
        journal.append_lines(path.with_suffix(".superseded.jsonl"), later)
    kept = [entry for entry in entries if entry["step"] <= last_step]
    journal.write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in kept).encode())
    return kept


_Key = tuple[int, str, int]
"""Step, split and model of an entry."""


def _key_of(entry: dict[str, Any]) -> _Key:
    return entry["step"], entry.get("split", ""), entry.get("model", 0)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The first entry of every step (split, model), and whether any line but a torn last one was not an entry."""
    found: dict[_Key, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")[:-1]
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                found.setdefault(_key_of(entry), entry)
    return [found[key] for key in sorted(found)], len(found) < len(lines)


class Recording:
    """The files of the run in folder `out`, from after `step` on."""

    def __init__(self, out: Path, step: int = 0, event_files: bool = False) -> None:
        self._out = out
        kept = {
            name: keep_lines(out / name, step)
            for name in ("metrics.jsonl", "evaluations.jsonl")
            if (out / name).exists()
        }
        self._evaluated = set(map(_key_of, kept.get("evaluations.jsonl", ())))
        """What sessions before have told: one that was killed right after its evaluation makes it again."""
        self._metrics = Lines(out / "metrics.jsonl")
        self._evaluations = Lines(out / "evaluations.jsonl")
        self._events = EventFiles(out / "tensorboard", purge_step=step + 1 if step else None) if event_files else None
        self._failing = False

    def metrics(self, entries: list[dict[str, Any]]) -> None:
        """A line an update."""
        self._write(self._metrics, entries)
        if self._events is not None:
            for entry in entries:
                self._events.add(entry["step"], _scalars(entry))

    def evaluations(self, state: RunState, split: str, found: list[Evaluated]) -> None:
        """A line a model that was evaluated, but for losses that are not finite."""
        for model, each in enumerate(found):
            if math.isfinite(each.loss):
                entry = {"step": state.step, "epoch": state.epochs, "split": split, **each._asdict()}
                if state.consensus_distance is not None:
                    entry["consensus_distance"] = state.consensus_distance
                self._evaluation(entry if len(found) == 1 else {**entry, "model": model})

    def _evaluation(self, entry: dict[str, Any]) -> None:
        name = f" of model {entry['model']}" if "model" in entry else ""
        line = "update %(step)d, epoch %(epoch)d: %(split)s loss %(loss).4f over %(targets)d targets"
        log.info(line + name, entry)
        if _key_of(entry) in self._evaluated:
            return
        self._write(self._evaluations, [entry])
        if self._events is not None:
            model = f"/{entry['model']}" if "model" in entry else ""
            self._events.add(entry["step"], {f"{entry['split']}_loss{model}": entry["loss"]})

    def write_json(self, name: str, value: Any) -> bool:
        """Replace OUT/name; False where that failed."""
        try:
            journal.write_atomically(self._out / name, (json.dumps(value, indent=2) + "\n").encode())
        except OSError as error:
            self._complain(error)
            return False
        return True

    def close(self) -> bool:
        """Write what waits; False where lines are lost."""
        for lines in (self._metrics, self._evaluations):
            self._write(lines, [])
        if self._events is not None:
            self._events.close()
        return not self._metrics.waiting and not self._evaluations.waiting

    def _write(self, lines: Lines, entries: list[dict[str, Any]]) -> None:
        try:
            lines.append(entries)
        except OSError as error:
            self._complain(error)
            return
        self._failing = False

    def _complain(self, error: OSError) -> None:
        """Once, until a write succeeds again."""
        if not self._failing:
            line = f"{self._out} cannot be written ({error}); training goes on, and what waits is tried again"
            log.warning(line)  # into a file on the same disk, so a person is told as well
            say(line, sys.stderr)
        self._failing = True


def _scalars(entry: dict[str, Any]) -> dict[str, float]:
    """What event files take of a metrics line: its numbers, a pack's model by model."""
    scalars: dict[str, float] = {}
    for key in entry.keys() - {"step", "tokens"}:
        values = entry[key]
        if isinstance(values, list):
            scalars |= {f"{key}/{model}": value for model, value in enumerate(values) if value is not None}
        else:
            scalars[key] = values
    return scalars
