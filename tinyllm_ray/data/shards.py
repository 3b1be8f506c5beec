"""Writes shards: a stream of tokens is cut into files of equal length, each of which appears whole or not at all."""

import hashlib
from pathlib import Path

import numpy as np

from tinyllm_ray.data.cache import ShardEntry, Tokens, token_dtype
from tinyllm_ray.journal import write_atomically


class ShardWriter:
    """The shards of one split; only the last may be shorter than `shard_tokens`."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int) -> None:
        self.split = split
        self.dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._folder = folder
        self._shard: Tokens = np.empty(shard_tokens, self.dtype)
        self._filled = 0
        self._entries: list[ShardEntry] = []

    def append(self, tokens: Tokens) -> None:
        assert tokens.dtype == self.dtype  # a cast would wrap ids in silence
        while tokens.size:
            part = tokens[: self._shard.size - self._filled]
            self._shard[self._filled : self._filled + part.size] = part
            self._filled += part.size
            if self._filled == self._shard.size:
                self._write()
            tokens = tokens[part.size :]

    def close(self) -> list[ShardEntry]:
        """Write what is left, and list all shards."""
        if self._filled:
            self._write()
        return self._entries

    def _write(self) -> None:
        data = self._shard[: self._filled].tobytes()
        entry = ShardEntry(
            split=self.split,
            file=f"{self.split}-{len(self._entries):05d}.bin",
            tokens=self._filled,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        write_atomically(self._folder / entry.file, data)
        self._entries.append(entry)
        self._filled = 0
