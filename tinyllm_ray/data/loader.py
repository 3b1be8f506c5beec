"""Rows for training, shuffled by seed alone and resumable at any row, and rows for evaluation, in order."""

import logging
from collections.abc import Iterator
from typing import Any, Protocol, Self

import numpy as np

from tinyllm_ray.data.cache import TokenCache, Tokens
from tinyllm_ray.data.ranges import FileRanges, RangeSource
from tinyllm_ray.data.read_ahead import LoadedRange, OnActivation, ReadAhead
from tinyllm_ray.data.rows import count_rows, row_ranges, subset_rows, visits
from tinyllm_ray.errors import ConfigError

log = logging.getLogger(__name__)


class Loader(Protocol):
    """What makes the batches of a feed."""

    context: int
    dtype: np.dtype[Any]

    @property
    def position(self) -> int:
        """Rows dealt out of an order of them."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Time spent waiting for a range to be read."""
        ...

    def next(self, rows: int) -> Tokens:
        """The next batch, [rows, context + 1]."""
        ...

    def next_into(self, out: Tokens) -> None:
        """As `next`, into an array that is there."""
        ...

    def check_batch(self, rows: int) -> None:
        """Raises ConfigError where a batch is larger than a pass."""
        ...

    def close(self) -> None:
        """Stop reading; returns at once."""
        ...


class RowLoader:
    """Batches of one worker's rows out of the endless shuffled order of a split's rows.

    The order runs pass after pass, each over all rows, range by range. It is a function of cache, context, seed and
    `shards_per_range`; from `start_row` on it is dealt to `of` workers in turn, of which this is number `worker`.
    Tokens come from `ranges`, which the loader closes, else from the cache's files.
    """

    def __init__(
        self,
        cache: TokenCache,
        split: str = "train",
        *,
        context: int,
        seed: int,
        shards_per_range: int = 2,
        read_ahead: int = 1,
        worker: int = 0,
        of: int = 1,
        start_row: int = 0,
        ranges: RangeSource | None = None,
        on_activation: OnActivation | None = None,
    ) -> None:
        assert 0 <= worker < of
        assert start_row >= 0
        self.context = context
        self.dtype = cache.dtype
        self.position = start_row
        """Rows of the whole order, all workers', that are dealt out."""
        found = row_ranges([shard.tokens for shard in cache.shards(split)], context, shards_per_range)
        self.rows_per_pass = sum(row_range.rows for row_range in found)
        self._name = f"{split} of {cache.folder}"
        if not self.rows_per_pass:
            raise ConfigError(
                f"{self._name}: {cache.tokens(split):,} tokens make no row of {context} + 1; "
                "use a larger cache or a smaller model.context"
            )
        self._worker, self._of = worker, of
        order, source = visits(found, seed, start_row), ranges or FileRanges(cache)
        self._reader = ReadAhead(source, split, context, seed, order, read_ahead, on_activation)
        self._range: LoadedRange | None = None
        self._pass: int | None = None
        """The range's pass; None before the first range."""

    @property
    def passes(self) -> int:
        """Whole passes behind the position."""
        return self.position // self.rows_per_pass

    @property
    def wait_seconds(self) -> float:
        """Time spent waiting for a range to be read."""
        return self._reader.wait_seconds

    def next(self, rows: int) -> Tokens:
        """The next `rows` rows of this worker, [rows, context + 1] in the cache's dtype."""
        out: Tokens = np.empty((rows, self.context + 1), self.dtype)
        self.next_into(out)
        return out

    def next_into(self, out: Tokens) -> None:
        """As `next`, into an array that is there. Raises ConfigError where a batch is larger than a pass."""
        assert out.shape[1:] == (self.context + 1,)
        assert out.dtype == self.dtype
        self.check_batch(len(out))
        place = self.position + self._worker
        filled = 0
        while filled < len(out):
            count = self._fill(out[filled:], place)
            filled += count
            place += count * self._of
        self.position += len(out) * self._of

    def check_batch(self, rows: int) -> None:
        """Raises ConfigError where a batch of `rows` rows a worker is larger than a pass: it would repeat rows."""
        if rows * self._of > self.rows_per_pass:
            raise ConfigError(
                f"{self._name}: a batch of {rows * self._of:,} rows is more than the {self.rows_per_pass:,} rows of "
                f"{self.context} tokens that it has; use a larger cache or a smaller training.tokens_per_update"
            )

    def close(self) -> None:
        """Stop reading; returns at once."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fill(self, out: Tokens, place: int) -> int:
        """Rows from `place` on into `out`, as far as their range goes; how many.

        On its own so that no reference to a range outlives its use: the last one's end unmaps it.
        """
        current = self._range_at(place)
        mine = current.order[place - current.visit.start :: self._of][: len(out)]
        out[: len(mine)] = current.rows[mine]
        return len(mine)

    def _range_at(self, place: int) -> LoadedRange:
        """The range that holds `place`, which never goes back."""
        while self._range is None or place >= self._range.visit.stop:
            self._range = None  # it is given back: a batch that fails halfway must not find it again
            self._range = self._reader.next()
            number = self._range.visit.pass_number
            if self._pass is not None and number > self._pass:
                log.info("pass %d over %s begins, in a new order", number + 1, self._name)
            self._pass = number
        return self._range


def validation_batches(cache: TokenCache, context: int, rows: int, split: str = "validation") -> Iterator[Tokens]:
    """A split's rows in order, [at most `rows`, context + 1], so that every token but the first is a target once.

    The last targets, fewer than a row of them, come alone as [1, n + 1]. Raises ConfigError where there is no target.
    """
    tokens = cache.tokens(split)
    if tokens < 2:
        raise ConfigError(f"{split} of {cache.folder}: {tokens} tokens hold nothing to predict; use a larger cache")
    full = count_rows(tokens, context)
    for first in range(0, full, rows):
        yield _read_rows(cache, split, context, first, min(rows, full - first))
    if full * context + 1 < tokens:
        yield cache.read(split, full * context, tokens)[np.newaxis]


def subset_batches(
    cache: TokenCache, context: int, rows: int, blocks: int, seed: int, split: str = "validation"
) -> Iterator[Tokens]:
    """A fixed subset of `blocks` rows of a split, or all where it has fewer, chosen by seed, in ascending order.

    Batches are [at most `rows`, context + 1]. Raises ConfigError where the split has no whole row.
    """
    full = count_rows(cache.tokens(split), context)
    if not full:
        raise ConfigError(
            f"{split} of {cache.folder}: {cache.tokens(split):,} tokens make no row of {context} + 1; "
            "use a larger cache or a smaller model.context"
        )
    chosen = subset_rows(full, blocks, seed)
    for first in range(0, len(chosen), rows):
        yield np.concatenate([_read_rows(cache, split, context, int(row), 1) for row in chosen[first : first + rows]])


def _read_rows(cache: TokenCache, split: str, context: int, first: int, rows: int) -> Tokens:
    tokens = cache.read(split, first * context, (first + rows) * context + 1)
    out: Tokens = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context].copy()
    return out
