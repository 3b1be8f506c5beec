"""Batches for models that train side by side, each on rows in an order of its own."""

from collections.abc import Callable, Sequence

import numpy as np

from tinyllm_ray.data.cache import Tokens
from tinyllm_ray.data.loader import RowLoader


class InterleavedLoader:
    """Batches in which row j N + i is the j-th of the i-th of N orders, one for each of `seeds`.

    `open_loader` makes the loader of a seed; orders of one seed are the same rows, read once.
    """

    def __init__(self, seeds: Sequence[int], open_loader: Callable[[int], RowLoader]) -> None:
        distinct = list(dict.fromkeys(seeds))
        self._loaders = [open_loader(seed) for seed in distinct]
        self._places = [[place for place, seed in enumerate(seeds) if seed == one] for one in distinct]
        self._orders = len(seeds)
        self.context, self.dtype = self._loaders[0].context, self._loaders[0].dtype

    @property
    def position(self) -> int:
        """Rows of each order that are dealt out."""
        return self._loaders[0].position

    @property
    def wait_seconds(self) -> float:
        """Time spent waiting for ranges to be read."""
        return sum(loader.wait_seconds for loader in self._loaders)

    def next(self, rows: int) -> Tokens:
        """The next `rows` rows, of all orders together, [rows, context + 1] in the cache's dtype."""
        out: Tokens = np.empty((rows, self.context + 1), self.dtype)
        self.next_into(out)
        return out

    def next_into(self, out: Tokens) -> None:
        """As `next`, into an array that is there. Raises ConfigError where a batch is larger than a pass."""
        self.check_batch(len(out))
        for loader, places in zip(self._loaders, self._places, strict=True):
            own = out[places[0] :: self._orders]
            loader.next_into(own)
            for place in places[1:]:
                out[place :: self._orders] = own

    def check_batch(self, rows: int) -> None:
        """Raises ConfigError where a batch of `rows` rows in all has more of an order than a pass."""
        assert rows % self._orders == 0, "every order gives a batch as many rows"
        self._loaders[0].check_batch(rows // self._orders)

    def close(self) -> None:
        """Stop reading; returns at once."""
        for loader in self._loaders:
            loader.close()
