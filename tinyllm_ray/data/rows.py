"""Which rows a pass over a split has and in which order they come: pure arithmetic over shards, seed and pass.

A row is `context` inputs and one token more, so that its targets are the inputs moved on by one: row k of a split of
N tokens holds the tokens [k * context, (k + 1) * context], wherever shards end, for k < floor((N - 1) / context).
Consecutive shards make a range, which is what gets read at once; a row belongs to the range of its first token.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows that are read and shuffled together."""

    index: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Visit:
    """A range at its turn."""

    range: RowRange
    pass_number: int
    start: int
    """Place of the range's first row in the order of all passes."""

    @property
    def stop(self) -> int:
        return self.start + self.range.rows


def count_rows(tokens: int, context: int) -> int:
    return max(0, (tokens - 1) // context)


def row_ranges(shard_tokens: Sequence[int], context: int, shards_per_range: int) -> list[RowRange]:
    """The ranges of a split in the order they lie; those in which no row begins are left out."""
    ends = list(itertools.accumulate(shard_tokens, initial=0))
    rows = count_rows(ends[-1], context)
    borders = [*ends[:-1:shards_per_range], ends[-1]]
    firsts = [min(rows, -(-border // context)) for border in borders[:-1]] + [rows]
    spans = [(first, last - first) for first, last in itertools.pairwise(firsts) if last > first]
    return [RowRange(index, first, count) for index, (first, count) in enumerate(spans)]


def visits(ranges: Sequence[RowRange], seed: int, start: int) -> Iterator[Visit]:
    """The endless order of ranges, from the one that holds place `start` of the order of all passes."""
    rows_per_pass = sum(row_range.rows for row_range in ranges)
    pass_number = start // rows_per_pass
    place = pass_number * rows_per_pass
    while True:
        for index in permutation(len(ranges), seed, pass_number):
            visit = Visit(ranges[index], pass_number, place)
            place = visit.stop
            if visit.stop > start:
                yield visit
        pass_number += 1


def row_order(visit: Visit, seed: int) -> Indices:
    """The order in which a range's rows, counted from its first, come at this turn."""
    return permutation(visit.range.rows, seed, visit.pass_number, visit.range.index + 1)


def subset_rows(rows: int, count: int, seed: int) -> Indices:
    """At most `count` of `rows` rows, ascending; the same for the same seed."""
    return np.sort(permutation(rows, seed)[:count])


def permutation(size: int, seed: int, *path: int) -> Indices:
    """A permutation that seed and path decide, on every machine and with every version of numpy."""
    # RandomState is the part of numpy.random whose numbers are promised to stay; it takes no negative seeds.
    source = np.random.SeedSequence([seed % 2**64, *path])
    return np.random.RandomState(np.random.MT19937(source)).permutation(size)
