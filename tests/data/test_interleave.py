"""Batches of several orders: each model sees the rows that it would see alone, at its places of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.data.feed import device_feed
from tinyllm_ray.data.gather import GatherAhead
from tinyllm_ray.data.interleave import InterleavedLoader
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.packed import deal

ROWS = 100  # of the counting cache at context 10


def loader_of(cache, seed, **options):
    return RowLoader(cache, context=10, seed=seed, **options)


def interleaved(cache, seeds, **options):
    return InterleavedLoader(seeds, lambda seed: loader_of(cache, seed, **options))


@settings(max_examples=25)
@given(
    seeds=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    start=st.integers(0, 250),
    shards=st.integers(1, 4),
)
def test_each_order_is_that_of_its_seed_alone(counting_cache, seeds, sizes, start, shards):
    """Across ranges and passes, from any row; equal seeds get equal rows."""
    options = {"start_row": start, "shards_per_range": shards}
    loader, alone = (
        interleaved(counting_cache, seeds, **options),
        [loader_of(counting_cache, s, **options) for s in seeds],
    )
    assert loader.position == start
    for size in sizes:
        batch = loader.next(size * len(seeds))
        for place, own in enumerate(alone):
            assert (batch[place :: len(seeds)] == own.next(size)).all()
        assert loader.position == alone[0].position
    for one in (loader, *alone):
        one.close()


def test_the_models_rows_are_those_that_are_dealt_to_them(counting_cache):
    with loader_of(counting_cache, 1) as one, loader_of(counting_cache, 2) as two:
        loader = interleaved(counting_cache, [1, 2])
        dealt = deal(torch.from_numpy(loader.next(14).astype(np.int64)), 2)
        assert (dealt[0].numpy() == one.next(7)).all()
        assert (dealt[1].numpy() == two.next(7)).all()
        loader.close()


def test_orders_of_one_seed_are_read_once(counting_cache):
    opened = []

    def open_loader(seed):
        opened.append(seed)
        return loader_of(counting_cache, seed)

    loader = InterleavedLoader([5, 7, 5, 5], open_loader)
    assert opened == [5, 7]
    batch = loader.next(40)
    assert (batch[0::4] == batch[2::4]).all()
    assert (batch[0::4] == batch[3::4]).all()
    assert not (batch[0::4] == batch[1::4]).all()
    loader.close()


def test_feeds_take_it(counting_cache):
    feed = device_feed(interleaved(counting_cache, [1, 2], start_row=5), 6, torch.device("cpu"))
    expected = interleaved(counting_cache, [1, 2], start_row=5)
    assert feed.position == 5
    for _ in range(40):
        assert (feed.next().numpy() == expected.next(6)).all()
    assert feed.position == 5 + 40 * 3
    feed.close()
    expected.close()


def test_a_thread_may_gather_it(counting_cache):
    expected = interleaved(counting_cache, [1, 2])
    buffers = [np.empty((6, 11), np.uint16) for _ in range(2)]
    gather = GatherAhead(interleaved(counting_cache, [1, 2]), buffers)
    for number in range(1, 40):
        found = gather.next()
        assert found.position == 3 * number
        assert (buffers[found.buffer] == expected.next(6)).all()
        gather.give_back(found.buffer)
    gather.close()
    expected.close()


def test_a_batch_with_more_of_an_order_than_a_pass_is_refused(counting_cache):
    loader = interleaved(counting_cache, [1, 2])
    assert loader.next(2 * ROWS).shape == (200, 11)
    with pytest.raises(ConfigError, match="a batch of 101 rows is more than the 100 rows"):
        loader.next(2 * ROWS + 2)
    with pytest.raises(ConfigError, match="a batch of 101 rows is more than the 100 rows"):
        device_feed(loader, 2 * ROWS + 2, torch.device("cpu"))
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader.next(2 * ROWS)


@settings(max_examples=25)
@given(models=st.integers(1, 5), rows=st.integers(1, 4), start=st.integers(0, 30), seed=st.integers(0, 3))
def test_mixed_models_are_dealt_every_nth_row_of_one_order_and_none_twice(counting_cache, models, rows, start, seed):
    """As the trainer deals them: batches of one loader, of which model i has row i, N + i, 2 N + i, ..."""
    updates = (ROWS - start) // (rows * models)  # within a pass, where every row is another
    with loader_of(counting_cache, seed) as whole, loader_of(counting_cache, seed, start_row=start) as loader:
        order = whole.next(ROWS)[start:, 0].astype(np.int64)
        seen = [[] for _ in range(models)]
        for _ in range(updates):
            for model, own in enumerate(deal(torch.from_numpy(loader.next(rows * models).astype(np.int64)), models)):
                seen[model] += own[:, 0].tolist()
        for model, own in enumerate(seen):
            assert own == order[model : updates * rows * models : models].tolist()
        dealt = [row for own in seen for row in own]
        assert len(set(dealt)) == len(dealt) == updates * rows * models
