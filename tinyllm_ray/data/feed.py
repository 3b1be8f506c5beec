"""Batches on the device: rows travel in the cache's dtype, copied ahead of their use, and widen where they are used."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from tinyllm_ray.data.cache import token_dtype
from tinyllm_ray.data.gather import GatherAhead
from tinyllm_ray.data.loader import Loader

_PINNED_BUFFERS = 4
"""One under copy, one copied and in use, two gathered ahead: 1 MiB at 128 rows of 1,024."""


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


class _Ahead(NamedTuple):
    batch: torch.Tensor
    copied: torch.cuda.Event
    buffer: int
    position: int


class HostFeed:
    """A loader's batches in host memory, each gathered when it is asked for: with no device to hide it behind, a
    thread would only take cores from the update. The feed closes the loader."""

    def __init__(self, loader: Loader, rows: int) -> None:
        loader.check_batch(rows)
        self._loader, self._rows = loader, rows

    @property
    def position(self) -> int:
        return self._loader.position

    @property
    def wait_seconds(self) -> float:
        return self._loader.wait_seconds

    def next(self) -> torch.Tensor:
        """The next batch. Raises what the loader raised for it."""
        return torch.from_numpy(self._loader.next(self._rows))

    def close(self) -> None:
        self._loader.close()


class CudaFeed:
    """A loader's batches on a CUDA device, each gathered and copied while those before are in use.

    A thread gathers rows into pinned buffers; `next` only enqueues copies, a batch ahead where that is gathered, on a
    stream of their own. A buffer is filled again once its copy is over, and the stream that uses a batch waits for that
    batch's copy alone. The feed closes the loader.
    """

    def __init__(self, loader: Loader, rows: int, device: torch.device) -> None:
        loader.check_batch(rows)
        self.position = loader.position
        self._device = device
        dtype = torch.from_numpy(np.empty(0, loader.dtype)).dtype
        shape = (rows, loader.context + 1)
        self._hosts = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(_PINNED_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._gather = GatherAhead(loader, [host.numpy() for host in self._hosts])
        self._ahead: _Ahead | Exception | None = None

    @property
    def wait_seconds(self) -> float:
        return self._gather.wait_seconds

    def next(self) -> torch.Tensor:
        """The next batch. Raises what the loader raised for it."""
        user = torch.cuda.current_stream(self._device)
        present = self._enqueue(user) if self._ahead is None else self._ahead
        if isinstance(present, Exception):
            raise present
        user.wait_event(present.copied)
        # The batch was allocated on the copying stream: without this its memory could be given to the copy after
        # next while the user's kernels still wait to read it.
        present.batch.record_stream(user)
        self.position = present.position
        # What is not there yet is waited for by the next call, with the device at work on this batch in the meantime.
        self._ahead = self._try_enqueue(user) if self._gather.ready else None
        present.copied.synchronize()  # over long since, but for the first batch
        self._gather.give_back(present.buffer)
        return present.batch

    def close(self) -> None:
        self._gather.close()
        self._ahead = None

    def _enqueue(self, user: torch.cuda.Stream) -> _Ahead:
        found = self._gather.next()
        copied = self._copied[found.buffer]
        # Not torch.cuda.stream(...): as a context manager it asks for the current stream again, twice.
        torch.cuda.set_stream(self._stream)
        try:
            batch = self._copy(self._hosts[found.buffer])
            copied.record(self._stream)
        finally:
            torch.cuda.set_stream(user)
        return _Ahead(batch, copied, found.buffer, found.position)

    def _copy(self, host: torch.Tensor) -> torch.Tensor:
        """Enqueue the copy of a batch on the current stream."""
        return host.to(self._device, non_blocking=True)

    def _try_enqueue(self, user: torch.cuda.Stream) -> _Ahead | Exception:
        """A failure belongs to the batch ahead, which the run may never ask for."""
        try:
            return self._enqueue(user)
        except Exception as error:
            return error


def device_feed(loader: Loader, rows: int, device: torch.device) -> HostFeed | CudaFeed:
    """The feed of a loader's batches on `device`. Raises ConfigError where a batch is larger than a pass."""
    return CudaFeed(loader, rows, device) if device.type == "cuda" else HostFeed(loader, rows)


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
