"""Opens text files, compressed or not, and reads them as checked UTF-8 with one kind of line end."""

import codecs
import contextlib
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.modules import require

BLOCK_BYTES: Final = 2**20
_BOM: Final = b"\xef\xbb\xbf"
_MAGIC: Final = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00"}
COMPRESSIONS: Final = tuple(_MAGIC)

Advance = Callable[[int], None]
"""Called with the bytes of a file, as they lie on disk, that were read since the last call."""


def read_blocks(path: Path, advance: Advance) -> Iterator[bytes]:
    """A file's bytes, unpacked, in blocks. Raises ConfigError naming the file where it cannot be read."""
    try:
        with path.open("rb") as raw:
            kind = _compression(path, raw)
            with contextlib.closing(_unpack(raw, kind)) as stream:
                seen = 0
                while block := stream.read(BLOCK_BYTES):
                    yield block
                    advance(raw.tell() - seen)
                    seen = raw.tell()
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: the {path.suffix} data is damaged or cut off ({error}); fetch it again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _compression(path: Path, raw: IO[bytes]) -> str | None:
    """The compression that the file's name says, once its first bytes agree."""
    first = raw.read(8)
    raw.seek(0)
    found = next((suffix for suffix, magic in _MAGIC.items() if first.startswith(magic)), None)
    named = path.suffix.lower() if path.suffix.lower() in _MAGIC else None
    if found and not named:
        raise ConfigError(f"{path}: its first bytes are those of a {found} file; give it the ending {found}")
    if named and named != found and first:
        raise ConfigError(f"{path}: is no {named} file, by its first bytes {first.hex()}; give it its right ending")
    return named


def _unpack(raw: IO[bytes], kind: str | None) -> Any:
    if kind == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if kind == ".xz":
        return lzma.LZMAFile(raw)
    if kind == ".zst":
        # Python's own module begins with 3.14.
        require("pyarrow", f"a {kind} file")
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
    return raw


def text_blocks(path: Path, advance: Advance, *, normalise: bool = True) -> Iterator[bytes]:
    """A file's text without byte-order mark, checked to be UTF-8, in blocks that may end inside a character.

    With `normalise` every line ends in a line feed. Raises ConfigError naming the file and the byte that is wrong.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = b""  # of the last block: the beginning of a byte-order mark, or a carriage return
    position, begun = 0, False
    for block in read_blocks(path, advance):
        _check_utf8(path, decoder, block, position, final=False)
        position += len(block)
        block = held + block
        held = b""
        if not begun:
            if len(block) < len(_BOM):
                held = block
                continue
            block, begun = block.removeprefix(_BOM), True
        if normalise:
            if block.endswith(b"\r"):
                block, held = block[:-1], b"\r"
            block = _line_feeds(block)
        if block:
            yield block
    _check_utf8(path, decoder, b"", position, final=True)
    if held:
        yield _line_feeds(held) if normalise else held


def _line_feeds(block: bytes) -> bytes:
    return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block


def _check_utf8(path: Path, decoder: codecs.IncrementalDecoder, block: bytes, position: int, *, final: bool) -> None:
    kept, _ = decoder.getstate()
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError as error:
        wrong = position - len(kept) + error.start
        _refuse(path, wrong, error)


def _refuse(path: Path, offset: int, error: UnicodeDecodeError) -> NoReturn:
    found = f"0x{error.object[error.start]:02x}" if error.start < len(error.object) else "the end"
    raise ConfigError(
        f"{path}: is not UTF-8 at byte {offset:,} ({found}: {error.reason}); convert it, for example with iconv"
    )


def lines_of(blocks: Iterator[bytes], most_bytes: int, too_long: Callable[[int], Exception]) -> Iterator[bytes]:
    """Lines without their line feeds; `too_long`, given a line's number, makes the error for one above `most_bytes`."""
    rest = b""
    number = 0
    for block in blocks:
        *lines, tail = block.split(b"\n")
        if lines:
            lines[0] = rest + lines[0]
            rest = b""
            for line in lines:
                number += 1
                if len(line) > most_bytes:
                    raise too_long(number)
                yield line
            rest = tail
        else:
            # Few and large joins: a line of 64 MB comes in 64 blocks.
            rest += tail
        if len(rest) > most_bytes:
            raise too_long(number + 1)
    if rest:
        yield rest
