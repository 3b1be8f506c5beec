"""Row arithmetic: a partition of every split into ranges, and an order that seed and pass alone decide."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.data.rows import count_rows, permutation, row_order, row_ranges, subset_rows, visits

shard_lists = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def places(ranges, seed, start, count):
    """The first `count` rows from `start` on."""
    rows = []
    for visit in visits(ranges, seed, start):
        order = visit.range.first_row + row_order(visit, seed)
        rows += order[max(0, start - visit.start) :].tolist()
        if len(rows) >= count:
            return rows[:count]
    raise AssertionError("visits never end")


def test_rows_follow_the_documented_rule():
    assert count_rows(100, 8) == 12  # floor(99 / 8)
    assert count_rows(97, 8) == 12  # the last row's last target is the last token
    assert count_rows(96, 8) == 11
    assert [count_rows(tokens, 8) for tokens in (0, 1, 8, 9)] == [0, 0, 0, 1]


@given(shard_lists, st.integers(1, 20), st.integers(1, 4))
def test_ranges_partition_the_rows(shards, context, shards_per_range):
    ranges = row_ranges(shards, context, shards_per_range)
    covered = [row for r in ranges for row in range(r.first_row, r.first_row + r.rows)]
    assert covered == list(range(count_rows(sum(shards), context)))
    assert [r.index for r in ranges] == list(range(len(ranges)))
    borders = [0, *itertools.accumulate(shards)]
    for r in ranges:
        shard_of = [
            np.searchsorted(borders, row * context, side="right") - 1 for row in (r.first_row, r.first_row + r.rows - 1)
        ]
        assert shard_of[0] // shards_per_range == shard_of[1] // shards_per_range


@given(shard_lists, st.integers(1, 8), st.integers(1, 4), st.integers())
def test_every_pass_has_every_row_once(shards, context, shards_per_range, seed):
    ranges = row_ranges(shards, context, shards_per_range)
    rows = count_rows(sum(shards), context)
    if rows:
        order = places(ranges, seed, 0, 3 * rows)
        for number in range(3):
            assert sorted(order[number * rows : (number + 1) * rows]) == list(range(rows))


@given(shard_lists, st.integers(1, 8), st.integers(1, 4), st.integers(0, 400))
def test_an_order_taken_up_anywhere_is_the_unbroken_one(shards, context, shards_per_range, start):
    ranges = row_ranges(shards, context, shards_per_range)
    if ranges:
        assert places(ranges, 7, start, 50) == places(ranges, 7, 0, start + 50)[start:]


def test_passes_and_seeds_have_orders_of_their_own():
    ranges = row_ranges([100] * 10, 4, 2)
    rows = sum(r.rows for r in ranges)
    passes = [tuple(places(ranges, seed, number * rows, rows)) for seed in (0, 1, -1) for number in range(3)]
    assert len(set(passes)) == len(passes)
    range_orders = {tuple(row // 50 for row in order[::50]) for order in passes}
    assert len(range_orders) > 1


def test_ranges_of_one_pass_have_orders_of_their_own():
    ranges = row_ranges([100] * 6, 4, 1)
    turns = itertools.islice(visits(ranges, 0, 0), len(ranges))
    assert len({tuple(row_order(visit, 0)) for visit in turns}) == len(ranges)


def test_neighbours_are_spread():
    (one,) = row_ranges([100_000], 10, 1)
    order = np.array(places([one], 3, 0, one.rows))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_permutations_stay_what_they_were():
    # A run is resumed by recomputing its order: other numbers here would break every checkpoint.
    assert permutation(10, 42, 1, 2).tolist() == [1, 8, 9, 6, 2, 4, 5, 0, 7, 3]
    assert subset_rows(100, 5, 12345).tolist() == [10, 23, 37, 39, 90]


@given(st.integers(1, 50), st.integers(1, 60), st.integers())
def test_a_subset_is_distinct_and_ascending(rows, count, seed):
    chosen = subset_rows(rows, count, seed).tolist()
    assert len(chosen) == min(rows, count)
    assert chosen == sorted(set(chosen))
    assert all(0 <= row < rows for row in chosen)
