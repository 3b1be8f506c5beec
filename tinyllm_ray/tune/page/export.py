"""A study's records as a table for other programs: CSV and Parquet, a row a trial."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.table import table_row


def write_csv(records: Iterable[TrialRecord], path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    _write(records, path, pyarrow.csv.write_csv, "--csv")


def write_parquet(records: Iterable[TrialRecord], path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    _write(records, path, pyarrow.parquet.write_table, "--parquet")


def table(records: Iterable[TrialRecord]) -> Any:
    """A pyarrow Table with the columns of `TuneResult.to_pandas`."""
    rows = [table_row(record) for record in records]
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> Any:
    """Values of several types, like a thread count that is a word in another study, become texts."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array([None if value is None else str(value) for value in values])


def _write(records: Iterable[TrialRecord], path: Path, write: Any, option: str) -> None:
    try:
        write(table(records), str(path))
    except OSError as error:
        why = "the folder does not exist" if not path.parent.is_dir() else error.strerror or "it cannot be written"
        raise ConfigError(f"{option} {path}: {why}; name a file in a folder that can be written") from None
