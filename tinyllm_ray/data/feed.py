"""Batches on the device: rows travel in the cache's dtype, copied ahead of their use, and widen where they are used."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from tinyllm_ray.data.cache import token_dtype
from tinyllm_ray.data.loader import RowLoader


class Feed(Protocol):
    """What a trainer needs: the next batch, and what waiting for it has cost."""

    def next(self) -> torch.Tensor:
        """[rows, context + 1] on the device, in the cache's dtype."""
        ...

    @property
    def position(self) -> int:
        """The loader's row cursor after the last batch handed out: where a run that stops here goes on."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Host time spent waiting for data."""
        ...

    def close(self) -> None: ...


def widen(batch: torch.Tensor) -> torch.Tensor:
    """The ids as int64, which embeddings and losses index with."""
    return batch.to(torch.int64)


def inputs_and_targets(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 views [rows, context] of one widened batch, the targets one token on."""
    wide = widen(batch)
    return wide[:, :-1], wide[:, 1:]


class _Ahead(NamedTuple):
    batch: torch.Tensor
    copied: torch.cuda.Event
    position: int


class DeviceFeed:
    """A loader's batches on `device`, on CUDA each copied while the one before is in use.

    Two pinned buffers take turns; a buffer is filled again once its copy is over, and the stream that uses a batch
    waits for that batch's copy alone. The feed closes the loader.
    """

    def __init__(self, loader: RowLoader, rows: int, device: torch.device) -> None:
        loader.check_batch(rows)
        self.position = loader.position
        self._loader, self._rows, self._device = loader, rows, device
        self._ahead: _Ahead | Exception | None = None
        self._turn = 0
        if device.type == "cuda":
            dtype = torch.from_numpy(np.empty(0, loader.dtype)).dtype
            shape = (rows, loader.context + 1)
            self._hosts = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(2)]
            self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def wait_seconds(self) -> float:
        return self._loader.wait_seconds

    def next(self) -> torch.Tensor:
        """The next batch. Raises what the loader raised for it."""
        if self._device.type != "cuda":
            batch = torch.from_numpy(self._loader.next(self._rows)).to(self._device)
            self.position = self._loader.position
            return batch
        present = self._enqueue() if self._ahead is None else self._ahead
        if isinstance(present, Exception):
            raise present
        user = torch.cuda.current_stream(self._device)
        user.wait_event(present.copied)
        # The batch was allocated on the copying stream: without this its memory could be given to the copy after
        # next while the user's kernels still wait to read it.
        present.batch.record_stream(user)
        self.position = present.position
        self._ahead = self._try_enqueue()
        return present.batch

    def close(self) -> None:
        self._ahead = None
        self._loader.close()

    def _enqueue(self) -> _Ahead:
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        self._turn = 1 - self._turn
        copied.synchronize()  # the copy of two batches ago, over long since; at once where there was none
        self._loader.next_into(host.numpy())
        with torch.cuda.stream(self._stream):
            batch = host.to(self._device, non_blocking=True)
            copied.record(self._stream)
        return _Ahead(batch, copied, self._loader.position)

    def _try_enqueue(self) -> _Ahead | Exception:
        """A failure belongs to the batch ahead, which the run may never ask for."""
        try:
            return self._enqueue()
        except Exception as error:
            return error


class SyntheticFeed:
    """One random batch that stays on the device: an update's time without its data."""

    position = 0
    wait_seconds = 0.0

    def __init__(self, rows: int, context: int, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        generator = np.random.RandomState(seed % 2**32)
        ids = generator.randint(0, vocab_size, (rows, context + 1), dtype=np.int64)
        self._batch = torch.from_numpy(ids.astype(token_dtype(vocab_size))).to(device)

    def next(self) -> torch.Tensor:
        return self._batch

    def close(self) -> None:
        """Nothing to close."""
