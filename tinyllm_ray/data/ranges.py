"""Where the tokens of a range come from: the contract, and the reading of the cache's own files behind it."""

from typing import Protocol

import numpy as np

from tinyllm_ray.data.cache import TokenCache, Tokens


class RangeSource(Protocol):
    """Lends the tokens of ranges. One thread at a time uses a source, and the same one closes it."""

    def load(self, split: str, start: int, stop: int) -> Tokens:
        """The tokens [start, stop) of a split, read-only.

        Raises ConfigError naming a shard that is missing, too short, unreadable or holds ids outside the vocabulary.
        """
        ...

    def release(self, tokens: Tokens) -> None:
        """Give back what `load` lent; nobody may read it any more."""
        ...

    def close(self) -> None: ...


class FileRanges:
    """Ranges read from the cache's files, into buffers that are used again."""

    def __init__(self, cache: TokenCache) -> None:
        self._cache = cache
        self._lent: list[Tokens] = []
        self._free: list[Tokens] = []

    def load(self, split: str, start: int, stop: int) -> Tokens:
        size = stop - start
        buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.size < size:  # the split's last range is smaller than the others
            buffer = np.empty(size, self._cache.dtype)
        self._cache.read_into(split, start, buffer[:size])
        self._lent.append(buffer)
        tokens = buffer[:size]
        tokens.flags.writeable = False
        return tokens

    def release(self, tokens: Tokens) -> None:
        """Take a buffer back; an array that was lent by another source is left to its last holder."""
        for index, buffer in enumerate(self._lent):
            if tokens.base is buffer:
                self._free.append(self._lent.pop(index))
                return

    def close(self) -> None:
        self._free.clear()
