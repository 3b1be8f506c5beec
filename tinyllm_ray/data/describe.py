"""Says what a cache is, and shows a few of its rows as text where a tokenizer library is there to decode them."""

import json
from collections.abc import Iterator
from typing import Any, Final

from tinyllm_ray.data.cache import TOKENIZER_FOLDER, TokenCache
from tinyllm_ray.data.tokenizer import TOKENIZER_FILE

_ROW_TOKENS: Final = 64


def describe(cache: TokenCache, rows: int) -> Iterator[str]:
    """Lines for people: the facts, and the beginning of `rows` rows, evenly spread over the first split.

    Of rows there are no more than lie there one behind the other.
    """
    manifest = cache.manifest
    yield f"{cache.folder}: token cache {manifest.identity}"
    for key, value in manifest.source.items():
        yield f"  {key}: {value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)}"
    yield (
        f"  vocabulary: {manifest.vocab_size:,} entries as {manifest.dtype}, end of text {manifest.end_of_text}, "
        f"fingerprint {manifest.tokenizer_fingerprint[:16]}"
    )
    yield f"  layout: {manifest.layout}"
    prepared = manifest.preparation
    yield (
        f"  order: shuffled by seed {prepared.shuffle_seed} through {prepared.shuffle_buffer_documents:,} documents or "
        f"{prepared.shuffle_buffer_bytes / 1e6:,.0f} MB; shards of {prepared.shard_tokens:,} tokens"
    )
    for split, totals in manifest.splits.items():
        shards = cache.shards(split)
        yield (
            f"  {split}: {totals.tokens:,} tokens of {totals.documents:,} documents "
            f"({totals.empty_documents:,} empty ones left out), {totals.text_bytes:,} bytes of text, "
            f"in {len(shards):,} shards of {sum(shard.bytes for shard in shards):,} bytes"
        )
    if rows > 0:
        yield from _rows(cache, rows)


def _rows(cache: TokenCache, rows: int) -> Iterator[str]:
    split = next(iter(cache.manifest.splits))
    tokens = cache.tokens(split)
    backend, why = _backend(cache)
    if backend is None:
        yield f"  rows as ids, for there is nothing here to decode them with ({why}):"
    rows = min(rows, -(-tokens // _ROW_TOKENS))
    for number in range(rows):
        start = tokens * number // rows
        ids = cache.read(split, start, min(start + _ROW_TOKENS, tokens)).tolist()
        shown = ids if backend is None else backend.decode(ids, skip_special_tokens=False)
        yield f"  {split} from token {start:,}: {json.dumps(shown, ensure_ascii=False)}"


def _backend(cache: TokenCache) -> tuple[Any, str]:
    """The cache's tokenizer, or None and why not."""
    path = cache.folder / TOKENIZER_FOLDER / TOKENIZER_FILE
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "pip install tokenizers"
    try:
        return Tokenizer.from_file(str(path)), ""
    except Exception as error:  # the library has no other kind
        return None, f"{path}: {error}"
