"""Reads one local file as documents, by its ending: text, JSON Lines, JSON, CSV or Parquet."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.data.documents import LARGEST_DOCUMENT_BYTES, check_length, cut_long, too_long
from tinyllm_ray.data.textfiles import COMPRESSIONS, Advance, lines_of, text_blocks
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.modules import require

_LONGEST_LINE_BYTES: Final = 2 * LARGEST_DOCUMENT_BYTES
"""Of a JSON Lines file: what 64 MB of any script but Latin take when every character is escaped."""
_SMALLEST_JSON_BLOCK: Final = 2**20
_PARQUET_ROWS: Final = 64


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    text_column: str = "text"
    lines: bool = False
    """Whether each line of a .txt file is a document."""
    split_long: bool = False


Reader = Callable[[Path, Reading, Advance], Iterator[bytes]]


def read_file(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    """The documents of a file, empty ones too. Raises ConfigError naming the file, and the row where there is one."""
    return _READERS[ending(path)](path, reading, advance)


def ending(path: Path) -> str:
    """The ending that says how a file is read, a compression's left out. Raises ConfigError for an unknown one."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] and suffixes[-1] in COMPRESSIONS
    found = suffixes[-2] if packed and len(suffixes) > 1 else "" if packed or not suffixes else suffixes[-1]
    if found not in _READERS:
        raise ConfigError(
            f"{path}: the ending says nothing about its format; {', '.join(_READERS)} are read, all but .parquet also "
            f"with {', '.join(COMPRESSIONS)} after it"
        )
    if packed and found == ".parquet":
        raise ConfigError(f"{path}: a Parquet file is compressed inside and read as .parquet; unpack it")
    return found


def readable(path: Path) -> bool:
    try:
        ending(path)
    except ConfigError:
        return False
    return True


def row_text(value: Any, where: str) -> bytes:
    """A text column's value as UTF-8; null is an empty document. Raises ConfigError for anything but text."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: holds {value!r:.60}, which is no text; name another --text-column")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        found = ascii(value[error.start])
        raise ConfigError(f"{where}: holds half a character ({found}) at {error.start:,}; remove it") from None


def missing_column(where: str, column: str, there: Iterable[str]) -> ConfigError:
    names = ", ".join(map(str, there)) or "none"
    return ConfigError(f"{where}: there is no column {column!r}; its columns are {names}: name one with --text-column")


def _read_txt(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    blocks = text_blocks(path, advance)
    if reading.lines:
        yield from _lines(path, reading, blocks)
    elif reading.split_long:
        yield from _whole_or_parts(blocks)
    else:
        text = bytearray()
        for block in blocks:
            text += block
            if len(text) > LARGEST_DOCUMENT_BYTES:
                raise too_long(str(path))
        yield bytes(text)


def _lines(path: Path, reading: Reading, blocks: Iterator[bytes]) -> Iterator[bytes]:
    limit = 2**62 if reading.split_long else LARGEST_DOCUMENT_BYTES
    lines = lines_of(blocks, limit, lambda number: too_long(f"{path}: line {number:,}"))
    yield from check_length(lines, str(path), reading.split_long)


def _whole_or_parts(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """A text that fits as it is; a longer one, of any length, in parts."""
    text = bytearray()
    for block in blocks:
        text += block
        if len(text) > LARGEST_DOCUMENT_BYTES:
            yield from cut_long(_before(bytes(text), blocks))
            return
    yield bytes(text)


def _before(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _read_jsonl(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    def refuse(number: int) -> ConfigError:
        return ConfigError(
            f"{path}: line {number:,} is longer than {_LONGEST_LINE_BYTES:,} bytes, which no document may be; remove it"
        )

    blocks = text_blocks(path, advance, normalise=False)
    for number, line in enumerate(lines_of(blocks, _LONGEST_LINE_BYTES, refuse), start=1):
        if not line or line.isspace():
            continue
        where = f"{path}: line {number:,}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: is no JSON: {error}") from None
        yield from _row(row, where, reading)


def _row(row: Any, where: str, reading: Reading) -> Iterator[bytes]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is no object with columns, but {json.dumps(row):.60}")
    if reading.text_column not in row:
        raise missing_column(where, reading.text_column, row)
    text = row_text(row[reading.text_column], f"{where}, column {reading.text_column!r}")
    yield from check_length([text], where, reading.split_long)


def _read_json(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    """An array of objects, or objects one after another, a line each or not."""
    for number, row in enumerate(_json_values(path, advance), start=1):
        yield from _row(row, f"{path}: row {number:,}", reading)


def _json_values(path: Path, advance: Advance) -> Iterator[Any]:
    blocks = text_blocks(path, advance, normalise=False)
    decoder = json.JSONDecoder()
    text, place, wanted, more, kept = "", 0, _SMALLEST_JSON_BLOCK, True, b""
    first, open_brackets = True, 0
    while True:
        if more and len(text) - place < wanted:
            new = kept + next(blocks, b"")
            more = len(new) > len(kept)
            end = len(new) if not more else _whole_characters(new)
            text, place, kept = text[place:] + new[:end].decode(), 0, new[end:]
            continue
        start, place = place, _skip(text, place, "[]" if first else ",]")
        open_brackets += text.count("[", start, place) - text.count("]", start, place)
        if place == len(text) and not more:
            if open_brackets:
                raise ConfigError(f"{path}: is no JSON: it ends inside its array; fetch the file again")
            return
        try:
            value, place = decoder.raw_decode(text, place)
            wanted, first = _SMALLEST_JSON_BLOCK, False
        except (ValueError, RecursionError) as error:
            # The value may go on in what was not read yet.
            if not more or wanted > _LONGEST_LINE_BYTES:
                raise ConfigError(f"{path}: is no JSON: {error}") from None
            wanted = 2 * (len(text) - place) + 1
            continue
        yield value


def _whole_characters(data: bytes) -> int:
    """The length without a character that the end cuts; the text was checked before."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            width = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= width else len(data) - back
    return len(data)


def _skip(text: str, place: int, also: str) -> int:
    while place < len(text) and (text[place] in also or text[place].isspace()):
        place += 1
    return place


def _read_csv(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    csv.field_size_limit(_LONGEST_LINE_BYTES)
    lines = lines_of(
        text_blocks(path, advance), _LONGEST_LINE_BYTES, lambda number: too_long(f"{path}: line {number:,}")
    )
    rows = csv.reader((line.decode() + "\n" for line in lines), strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if reading.text_column not in header:
            raise missing_column(str(path), reading.text_column, header)
        column = header.index(reading.text_column)
        for row in rows:
            if not row:
                continue
            where = f"{path}: line {rows.line_num:,}"
            if len(row) != len(header):
                raise ConfigError(f"{where}: {len(row)} columns, {len(header)} expected; quote texts that hold commas")
            yield from check_length([row[column].encode()], where, reading.split_long)
    except csv.Error as error:
        raise ConfigError(f"{path}: line {rows.line_num:,} is no CSV: {error}") from None


def _read_parquet(path: Path, reading: Reading, advance: Advance) -> Iterator[bytes]:
    require("pyarrow", "a .parquet file")
    import pyarrow
    from pyarrow import parquet

    try:
        size = path.stat().st_size
        # Without pre_buffer and with a buffer, a column is read piece by piece, not a row group at once.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            schema = file.schema_arrow
            if reading.text_column not in schema.names:
                raise missing_column(str(path), reading.text_column, schema.names)
            rows, done, told = file.metadata.num_rows, 0, 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[reading.text_column]):
                for value in batch.column(0).to_pylist():
                    done += 1
                    where = f"{path}: row {done:,}"
                    text = row_text(value, f"{where}, column {reading.text_column!r}")
                    yield from check_length([text], where, reading.split_long)
                advance(size * done // rows - told)
                told = size * done // rows
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: is no Parquet file that can be read: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


_READERS: Final[dict[str, Reader]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
