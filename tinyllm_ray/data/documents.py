"""What a document is on its way into a cache: a split's name and UTF-8 text, at most 64 MB of it."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tinyllm_ray.errors import ConfigError

LARGEST_DOCUMENT_BYTES: Final = 64 * 10**6
PART_BYTES: Final = 4 * 2**20
"""Length of the parts of a document that may be split: long for a model's context, short for a tokenizer's memory."""

_CHARACTER_START = re.compile(rb"[^\x80-\xbf]")


class Document(NamedTuple):
    """One document of a split."""

    split: str
    text: bytes


def check_length(texts: Iterable[bytes], where: str, split_long: bool) -> Iterator[bytes]:
    """The texts of documents; those too long in parts where that is allowed, else a ConfigError that names `where`."""
    for text in texts:
        if len(text) <= LARGEST_DOCUMENT_BYTES:
            yield text
        elif split_long:
            yield from cut_long([text])
        else:
            raise too_long(where, len(text))


def too_long(where: str, found: int | None = None) -> ConfigError:
    """The refusal of a document that is too long."""
    size = f"{found:,} bytes" if found else f"more than {LARGEST_DOCUMENT_BYTES:,} bytes"
    return ConfigError(
        f"{where}: a document of {size}; {LARGEST_DOCUMENT_BYTES:,} are allowed: "
        "cut it, read it with --documents lines, or let --split-long-documents cut it"
    )


def cut_long(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """One text that comes in blocks, in parts of at most PART_BYTES: cut after a line, else after a word."""
    rest = bytearray()
    for block in blocks:
        rest += block
        while len(rest) > PART_BYTES:
            end = _cut(rest)
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)


def _cut(text: bytearray) -> int:
    for separator in (b"\n", b" "):
        if end := text.rfind(separator, 0, PART_BYTES) + 1:
            return end
    # In the middle of a word, but never of a character.
    return next(end for end in range(PART_BYTES, 0, -1) if _CHARACTER_START.match(text, end))


def split_by_hash(texts: Iterable[bytes], fraction: float) -> Iterator[Document]:
    """The texts, `fraction` of them as validation: each by its own hash, so that equal documents never part."""
    border = int(fraction * 2**64)
    for text in texts:
        number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
        yield Document("validation" if number < border else "train", text)
