"""Writes shards: a stream of tokens is cut into files of equal length, each of which appears whole or not at all."""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Self

import numpy as np

from tinyllm_ray.data.cache import ShardEntry, Tokens, token_dtype

Written = Callable[[ShardEntry, int], None]
"""Called when a full shard has appeared, with the tokens of the piece being appended that are in shards by then."""


class ShardWriter:
    """The shards of one split; only the last may be shorter than `shard_tokens`.

    Tokens go to the disk as they come, under a name that no reader looks for, so that a shard's length costs no memory.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        shard_tokens: int,
        vocab_size: int,
        entries: Iterable[ShardEntry] = (),
        written: Written = lambda entry, consumed: None,
    ) -> None:
        self.split = split
        self.dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._entries = list(entries)
        """With those of an earlier session."""
        self._written = written
        self._file: IO[bytes] | None = None
        self._temporary: Path | None = None
        self._filled = 0
        self._digest = hashlib.sha256()

    def append(self, tokens: Tokens) -> None:
        assert tokens.dtype == self.dtype  # a cast would wrap ids in silence
        consumed = 0
        while consumed < tokens.size:
            part = tokens[consumed : consumed + self._shard_tokens - self._filled]
            self._write(np.ascontiguousarray(part).view(np.uint8).data)
            self._filled += part.size
            consumed += part.size
            if self._filled == self._shard_tokens:
                self._written(self._finish(), consumed)

    def close(self) -> list[ShardEntry]:
        """Write what is left, and list all shards."""
        if self._filled:
            self._finish()
        return self._entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Drop a shard that was begun and not finished."""
        try:
            if self._file is not None:
                self._file.close()
        finally:
            # Whether or not it was opened: a signal may have come in between.
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)

    def _write(self, data: memoryview) -> None:
        if self._file is None:
            self._temporary = self._folder / f".{self._name()}.{secrets.token_hex(8)}.tmp"
            # Unbuffered: what a full disk refused would otherwise be tried once more on closing.
            self._file = self._temporary.open("wb", buffering=0)
            self._digest = hashlib.sha256()
        self._digest.update(data)
        while data:
            data = data[self._file.write(data) :]

    def _name(self) -> str:
        return f"{self.split}-{len(self._entries):05d}.bin"

    def _finish(self) -> ShardEntry:
        assert self._file is not None
        assert self._temporary is not None
        os.fsync(self._file.fileno())
        self._file.close()
        entry = ShardEntry(
            split=self.split,
            file=self._name(),
            tokens=self._filled,
            bytes=self._filled * self.dtype.itemsize,
            sha256=self._digest.hexdigest(),
        )
        self._temporary.replace(self._folder / entry.file)
        self._file = None
        self._entries.append(entry)
        self._filled = 0
        return entry
