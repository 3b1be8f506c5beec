"""Reads data sets through the `datasets` library: from the hub by name, from a local folder, or as saved to disk."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tinyllm_ray.data.documents import Document, check_length, split_by_hash
from tinyllm_ray.data.formats import missing_column, row_text
from tinyllm_ray.data.sources import Meter, Source, SourceOptions
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.modules import require


def open_hub(name: str, options: SourceOptions) -> Source:
    """The data set `name`. Raises ConfigError where it cannot be reached or lacks the config, split or column."""
    require("datasets", f"the data set {name!r}")
    import datasets

    def load(split: str) -> Any:
        with _Explained(name):
            return datasets.load_dataset(
                name, options.config, split=split, revision=options.revision, streaming=options.streaming
            )

    with _Explained(name, "; no file or folder has that name either"):
        there = datasets.get_dataset_split_names(name, options.config, revision=options.revision)
    wanted = _wanted_splits(name, there, options)
    parts = {split: load(its_name) for split, its_name in wanted.items()}
    facts = {"dataset": name, "config": options.config, "revision": options.revision}
    return _source(name, parts, wanted, facts, options)


def open_saved(folder: Path, options: SourceOptions) -> Source:
    """What `save_to_disk` wrote into `folder`: a data set of one split, or of several."""
    require("datasets", f"the data set {str(folder)!r}")
    import datasets

    with _Explained(str(folder)):
        loaded = datasets.load_from_disk(str(folder))
    parts = dict(loaded) if isinstance(loaded, Mapping) else {options.train_split: loaded}
    wanted = _wanted_splits(str(folder), list(parts), options)
    chosen = {split: parts[its_name] for split, its_name in wanted.items()}
    facts = {"saved": {split: part._fingerprint for split, part in chosen.items()}}
    return _source(str(folder), chosen, wanted, facts, options)


class _Explained:
    """What the library raises for a data set that is not there, or is damaged, in one line."""

    def __init__(self, name: str, also: str = "") -> None:
        self._name, self._also = name, also

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        # Errors of its own are of no common kind, and of a damaged file those of whoever reads it.
        if isinstance(error, Exception):
            why = error if error.__cause__ is None else f"{error}: {error.__cause__}"
            kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
            reason = " ".join(f"{kind}{why}".split())
            raise ConfigError(f"the data set {self._name!r} cannot be loaded: {reason:.500}{self._also}") from error


def _wanted_splits(name: str, there: list[str], options: SourceOptions) -> dict[str, str]:
    """The data set's name for each of our splits; validation is left out where it has none."""
    if options.train_split not in there:
        raise ConfigError(
            f"the data set {name!r} has no split {options.train_split!r}; it has {', '.join(there)}: "
            "name one with --train-split"
        )
    wanted = {"train": options.train_split}
    if options.validation_split in there:
        wanted["validation"] = options.validation_split
    elif options.validation_split != SourceOptions.validation_split:
        raise ConfigError(
            f"the data set {name!r} has no split {options.validation_split!r}; it has {', '.join(there)}: "
            "name one with --validation-split"
        )
    return wanted


def _source(
    name: str, parts: Mapping[str, Any], wanted: Mapping[str, str], facts: dict[str, Any], options: SourceOptions
) -> Source:
    column = options.text_column
    for part in parts.values():
        if part.column_names is not None and column not in part.column_names:
            raise missing_column(f"the data set {name!r}", column, part.column_names)
    settled: dict[str, Any] = {"splits": dict(wanted), "text_column": column}
    if "validation" not in parts:
        settled["validation_fraction"] = options.validation_fraction
    settled["split_long_documents"] = options.reading.split_long

    def texts(split: str, meter: Meter) -> Iterator[bytes]:
        part = parts[split]
        # A stream may not know its columns before its first row.
        rows = part.select_columns([column]) if part.column_names is not None else part
        for number, row in enumerate(_explained_rows(name, rows), start=1):
            where = f"{name}: split {wanted[split]!r}, row {number:,}"
            if column not in row:
                raise missing_column(where, column, row)
            text = row_text(row[column], f"{where}, column {column!r}")
            yield from check_length([text], where, options.reading.split_long)
            meter.advance(1)

    def read(meter: Meter) -> Iterator[Document]:
        meter.total = _rows(parts)
        if "validation" in parts:
            for split in parts:
                yield from (Document(split, text) for text in texts(split, meter))
        else:
            yield from split_by_hash(texts("train", meter), options.validation_fraction)

    known = {key: value for key, value in facts.items() if value is not None and key != "saved"}
    return Source({"dataset": name} | known | settled, facts | settled, read)


def _explained_rows(name: str, rows: Any) -> Iterator[Any]:
    iterator = iter(rows)
    while True:
        with _Explained(name):
            try:
                row = next(iterator)
            except StopIteration:
                return
        yield row


def _rows(parts: Mapping[str, Any]) -> int | None:
    """Rows in all, where the data set says so; one that is streamed may not."""
    total = 0
    for part in parts.values():
        splits = part.info.splits
        known = getattr(part, "num_rows", None) or (splits or {}).get(str(part.split), None)
        rows = known if isinstance(known, int) else getattr(known, "num_examples", None)
        if not rows:
            return None
        total += rows
    return total
