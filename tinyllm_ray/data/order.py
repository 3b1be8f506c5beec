"""The order of documents: shuffled by seed through a bounded buffer, cut into batches, and found again on resuming."""

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tinyllm_ray.data.cache import Preparation
from tinyllm_ray.data.documents import Document
from tinyllm_ray.errors import ConfigError


@dataclass(frozen=True)
class Position:
    """A place in the order of a split's documents."""

    documents: int = 0
    """Documents before it."""
    crc32: int = 0
    """CRC-32 over those documents, by which a changed input shows."""


class Batch(NamedTuple):
    """Consecutive documents of a split's order."""

    split: str
    documents: list[bytes]
    position: Position
    """Of the first document."""


class Shuffler:
    """Lets documents out in an order that the seed decides, while few enough are held."""

    def __init__(self, seed: str, most_documents: int, most_bytes: int) -> None:
        # Python promises the numbers of random() for a seed, and of nothing else in this module, across its versions.
        self._random = random.Random(seed)
        self._most_documents, self._most_bytes = most_documents, most_bytes
        self._held: list[bytes] = []
        self._bytes = 0

    def push(self, document: bytes) -> Iterator[bytes]:
        """Take a document in, and let out those that are too many."""
        self._held.append(document)
        self._bytes += len(document)
        while len(self._held) > self._most_documents or self._bytes > self._most_bytes:
            yield self._take()

    def drain(self) -> Iterator[bytes]:
        """Let out the rest."""
        while self._held:
            yield self._take()

    def _take(self) -> bytes:
        place = int(self._random.random() * len(self._held))
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        document = self._held.pop()
        self._bytes -= len(document)
        return document


class _Lane:
    """One split on its way through shuffling, skipping what an earlier session wrote, and batching."""

    def __init__(self, split: str, preparation: Preparation, start: Position, batch_bytes: int) -> None:
        self.shuffler = Shuffler(
            f"{preparation.shuffle_seed}/{split}",
            preparation.shuffle_buffer_documents,
            preparation.shuffle_buffer_bytes,
        )
        self._split, self._start, self._batch_bytes = split, start, batch_bytes
        self._position = self._first = Position()
        self._batch: list[bytes] = []
        self._size = 0

    def advance(self, documents: Iterable[bytes]) -> Iterator[Batch]:
        """Batches that the documents fill, each closed by the document that fills it."""
        for document in documents:
            if self._position.documents >= self._start.documents:
                if not self._batch:
                    self._check()
                self._batch.append(document)
                self._size += len(document)
            before = self._position
            self._position = Position(before.documents + 1, zlib.crc32(document, before.crc32))
            if self._size >= self._batch_bytes:
                yield self._close()

    def finish(self) -> Iterator[Batch]:
        yield from self.advance(self.shuffler.drain())
        if self._batch:
            yield self._close()
        elif self._position.documents <= self._start.documents:
            self._check()

    def _close(self) -> Batch:
        batch = Batch(self._split, self._batch, self._first)
        self._batch, self._size = [], 0
        return batch

    def _check(self) -> None:
        """The documents that were skipped must be those that were written."""
        self._first = self._position
        if self._position.documents <= self._start.documents and self._position != self._start:
            raise ConfigError(
                f"the input has changed since this preparation began: the first {self._start.documents:,} documents of "
                f"the split {self._split!r} are others; choose another --out to prepare it as it is now"
            )


def ordered_batches(
    documents: Iterable[Document], preparation: Preparation, starts: Mapping[str, Position], batch_bytes: int
) -> Iterator[Batch]:
    """Batches of every split in `starts`, from its place there on, in its own shuffled order.

    The place must be that of a batch. Raises ConfigError where the documents before it are not those of its CRC.
    """
    lanes = {split: _Lane(split, preparation, start, batch_bytes) for split, start in starts.items()}
    for split, text in documents:
        lane = lanes[split]
        yield from lane.advance(lane.shuffler.push(text))
    for lane in lanes.values():
        yield from lane.finish()
