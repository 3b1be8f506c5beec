"""What a half-done cache folder knows: the request it was begun for, and how far each split has come."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.data.cache import MANIFEST, ShardEntry
from tinyllm_ray.data.order import Position
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import append_line, read_lines, write_atomically

REQUEST: Final = "request.json"
_JOURNAL: Final = "progress.jsonl"


@dataclass(frozen=True)
class Counts:
    """What was counted over documents."""

    documents: int = 0
    empty_documents: int = 0
    text_bytes: int = 0


@dataclass(frozen=True)
class SplitState:
    """How far a split has come."""

    position: Position = field(default_factory=Position)
    """Of the batch in which the last shard ends."""
    counts: Counts = field(default_factory=Counts)
    """Over the documents before it."""
    tokens: int = 0
    """Of that batch that are in shards."""
    shards: tuple[ShardEntry, ...] = ()


def record(out: Path, entry: ShardEntry, state: SplitState) -> None:
    """Note a shard that has appeared; from then on a preparation that is resumed begins after it."""
    counted = {"position": asdict(state.position), "counts": asdict(state.counts), "tokens": state.tokens}
    append_line(out / _JOURNAL, {"shard": entry.model_dump()} | counted)


def recorded(out: Path, splits: tuple[str, ...]) -> dict[str, SplitState]:
    """The state of every split: up to the first of its shards that is not as it was recorded."""
    states = {split: SplitState() for split in splits}
    broken: set[str] = set()
    for line in read_lines(out / _JOURNAL):
        entry = ShardEntry.model_validate(line["shard"])
        if entry.split in broken:
            continue
        if not _is_there(out, entry):
            broken.add(entry.split)
            continue
        states[entry.split] = SplitState(
            Position(**line["position"]),
            Counts(**line["counts"]),
            line["tokens"],
            (*states[entry.split].shards, entry),
        )
    return states


def _is_there(out: Path, entry: ShardEntry) -> bool:
    try:
        return (out / entry.file).stat().st_size == entry.bytes
    except OSError:
        return False


def forget(out: Path) -> None:
    """Remove what only a half-done folder needs."""
    (out / _JOURNAL).unlink(missing_ok=True)
    forget_leftovers(out)


def forget_leftovers(out: Path) -> None:
    """Remove files that a process began and did not live to name."""
    for leftover in out.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def begun(out: Path, request: dict[str, Any]) -> Iterator[bool]:
    """Hold the folder `out` for a preparation, and say whether it is done already.

    Raises ConfigError where another process holds it, where it was begun for another request, and where it holds
    something else. A mistake in the request that shows before the first shard leaves nothing: the corrected request may
    then use the folder.
    """
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from None
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}: another process is preparing there; wait for it or choose another"
            ) from None
        except OSError:
            pass  # "no locks available" on some network file systems
        begins = _claim(out, request)
        try:
            yield (out / MANIFEST).exists()
        except ConfigError:
            if begins and not (out / _JOURNAL).exists():
                _withdraw(out, existed)
            raise
    finally:
        os.close(descriptor)


def _withdraw(out: Path, existed: bool) -> None:
    """Remove what was begun in `out`, and `out` where it was made for it; what is hidden there may be another's."""
    forget_leftovers(out)
    for entry in out.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not existed:
        out.rmdir()


def _claim(out: Path, request: dict[str, Any]) -> bool:
    """Whether the folder is begun by this; else it was begun for the same request before."""
    path = out / REQUEST
    try:
        there = json.loads(path.read_bytes())
    except FileNotFoundError:
        if any(not name.name.startswith(".") for name in out.iterdir()):
            what = "a token cache made in another way" if (out / MANIFEST).exists() else "other files"
            raise ConfigError(f"--out {out}: holds {what}; choose a new or empty folder") from None
        write_atomically(path, json.dumps(request, indent=1).encode() + b"\n")
        return True
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise ConfigError(f"{path}: is damaged; choose another --out, or remove that folder")
    if there != json.loads(json.dumps(request)):
        raise ConfigError(
            f"--out {out}: was begun for another request: {_difference(there, request)}; "
            "ask for the same again to go on, or choose another folder"
        )
    return False


def _difference(there: dict[str, Any], asked: dict[str, Any]) -> str:
    before, now = dict(_leaves(there)), dict(_leaves(json.loads(json.dumps(asked))))
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    shown = [f"{key} is {_shown(before.get(key))} there, {_shown(now.get(key))} now" for key in keys[:3]]
    return "; ".join(shown) + (f" (and {len(keys) - 3} more)" if len(keys) > 3 else "")


def _shown(value: Any) -> str:
    return "absent" if value is None else f"{value!r:.80}"


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
