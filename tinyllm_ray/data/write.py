"""Writes token caches: documents become shards through a tokenizer, and a session that ended early is gone on with."""

import functools
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.data.cache import (
    MANIFEST,
    TOKENIZER_FOLDER,
    Preparation,
    ShardEntry,
    SplitTotals,
    TokenCache,
    new_manifest,
    open_cache,
)
from tinyllm_ray.data.documents import Document
from tinyllm_ray.data.encode import Encoded, encode
from tinyllm_ray.data.order import Batch, Position, ordered_batches
from tinyllm_ray.data.resume import Counts, SplitState, forget, record, recorded
from tinyllm_ray.data.shards import ShardWriter
from tinyllm_ray.data.tokenizer import SavedTokenizer, is_saved, open_tokenizer
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically

MapBatches = Callable[[Callable[[list[bytes]], Encoded], Iterable[list[bytes]]], Iterable[Encoded]]
"""Applies a function to batches of documents and yields the results in order, as `map` does."""

BATCH_BYTES: Final = 2**18


@dataclass(frozen=True)
class Totals:
    """What lies in the cache by now, over all splits."""

    documents: int
    """Empty ones included."""
    tokens: int
    text_bytes: int


def write_cache(
    out: Path,
    documents: Iterable[Document],
    tokenizer: SavedTokenizer,
    source: dict[str, Any],
    *,
    splits: tuple[str, ...] = ("train", "validation"),
    preparation: Preparation,
    map_batches: MapBatches = map,
    progress: Callable[[Totals], None] = lambda totals: None,
) -> TokenCache:
    """Write the documents as a token cache into the folder `out`, and go on where an earlier session there ended.

    The documents of each split are shuffled by the seed through a bounded buffer and tokenized batch by batch through
    `map_batches`, which decides the speed and not the result. The tokenizer is copied to CACHE/tokenizer unless it is
    there. Shards appear whole, the manifest last. Raises ConfigError for a folder that holds a cache, for a split
    without text, and where the documents are not those that the earlier session began with.
    """
    if (out / MANIFEST).exists():
        raise ConfigError(f"{out}: holds a token cache already; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    settled = _settle_tokenizer(out / TOKENIZER_FOLDER, tokenizer)
    states = recorded(out, splits)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(_SplitWriter(out, split, state, preparation, settled))
            for split, state in states.items()
        }
        starts = {split: state.position for split, state in states.items()}
        batches = ordered_batches(documents, preparation, starts, BATCH_BYTES)
        for batch, encoded in _tokenized(batches, functools.partial(encode, settled), map_batches):
            writers[batch.split].append(batch.position, encoded)
            progress(_sum(writers.values()))
        shards = [entry for writer in writers.values() for entry in writer.close()]
        totals = {split: writer.totals() for split, writer in writers.items()}
    manifest = new_manifest(
        source=source,
        preparation=preparation,
        tokenizer_fingerprint=settled.fingerprint,
        vocab_size=settled.vocab_size,
        end_of_text=settled.end_of_text,
        splits=totals,
        shards=shards,
    )
    write_atomically(out / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
    forget(out)
    return open_cache(out)


def _settle_tokenizer(kept: Path, tokenizer: SavedTokenizer) -> SavedTokenizer:
    if kept.resolve() != tokenizer.folder.resolve() and not is_saved(kept):
        shutil.copytree(tokenizer.folder, kept, dirs_exist_ok=True)
    settled = open_tokenizer(kept)
    if settled.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"{kept}: is another tokenizer than {tokenizer.folder}; choose another folder")
    return settled


def _tokenized(
    batches: Iterator[Batch], function: Callable[[list[bytes]], Encoded], map_batches: MapBatches
) -> Iterator[tuple[Batch, Encoded]]:
    """Every batch, without its documents, beside its tokens."""
    waiting: deque[Batch] = deque()

    def texts() -> Iterator[list[bytes]]:
        for batch in batches:
            waiting.append(batch._replace(documents=[]))
            yield batch.documents

    results = map_batches(function, texts())
    with ExitStack() as stack:
        if isinstance(results, Generator):  # its processes end now, not when it is collected
            stack.enter_context(closing(results))
        for encoded in results:
            yield waiting.popleft(), encoded


class _SplitWriter:
    """Writes one split's tokens and counts, and notes after every shard where to go on."""

    def __init__(
        self, out: Path, split: str, state: SplitState, preparation: Preparation, tokenizer: SavedTokenizer
    ) -> None:
        self._out = out
        self._state = state
        self._counts = state.counts
        self._skip = state.tokens
        """Of the next batches: tokens that an earlier session wrote."""
        self._batch = state
        """Where to go on, were a shard to end in the batch at hand."""
        self._writer = ShardWriter(
            out, split, preparation.shard_tokens, tokenizer.vocab_size, state.shards, self._written
        )
        self.tokens = sum(entry.tokens for entry in state.shards)

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.__exit__(*exception)

    def append(self, position: Position, encoded: Encoded) -> None:
        skipped = min(self._skip, encoded.tokens.size)
        self._skip -= skipped
        self._batch = SplitState(position, self._counts, skipped)
        new = encoded.tokens[skipped:]
        self._writer.append(new)
        self.tokens += new.size
        self._counts = Counts(
            self._counts.documents + encoded.documents,
            self._counts.empty_documents + encoded.empty_documents,
            self._counts.text_bytes + encoded.text_bytes,
        )

    def _written(self, entry: ShardEntry, consumed: int) -> None:
        record(self._out, entry, replace(self._batch, tokens=self._batch.tokens + consumed))

    def close(self) -> list[ShardEntry]:
        return self._writer.close()

    def totals(self) -> SplitTotals:
        """Raises ConfigError where there is no text."""
        counts = self._counts
        if not self.tokens:
            seen = counts.documents + counts.empty_documents
            seen = counts.documents + counts.empty_documents
            raise ConfigError(
                f"the split {self._writer.split!r} holds no text in {seen} documents; give it more documents "
                "(--documents lines makes every line of a text file one), or a larger --validation-fraction"
            )
        return SplitTotals(
            tokens=self.tokens,
            documents=counts.documents,
            empty_documents=counts.empty_documents,
            text_bytes=counts.text_bytes,
        )

    @property
    def counts(self) -> Counts:
        return self._counts


def _sum(writers: Iterable[_SplitWriter]) -> Totals:
    writers = list(writers)
    return Totals(
        documents=sum(writer.counts.documents + writer.counts.empty_documents for writer in writers),
        tokens=sum(writer.tokens for writer in writers),
        text_bytes=sum(writer.counts.text_bytes for writer in writers),
    )
