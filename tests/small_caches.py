"""Token caches small enough to write by hand."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tinyllm_ray.data.cache import MANIFEST, Preparation, SplitTotals, TokenCache, new_manifest, open_cache
from tinyllm_ray.data.shards import ShardWriter

MakeCache = Callable[..., TokenCache]


def write_cache(folder: Path, splits: Mapping[str, Sequence[int]], shard_tokens: int, vocab_size: int) -> TokenCache:
    folder.mkdir(parents=True, exist_ok=True)
    shards, totals = [], {}
    for split, tokens in splits.items():
        writer = ShardWriter(folder, split, shard_tokens, vocab_size)
        writer.append(np.asarray(tokens, writer.dtype))
        shards += writer.close()
        totals[split] = SplitTotals(tokens=len(tokens), documents=1, empty_documents=0, text_bytes=0)
    manifest = new_manifest(
        source={"corpus": "made by hand"},
        preparation=Preparation(shuffle_seed=0, shuffle_buffer_documents=0, shard_tokens=shard_tokens),
        tokenizer_fingerprint="0" * 64,
        vocab_size=vocab_size,
        end_of_text=0,
        splits=totals,
        shards=shards,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return open_cache(folder)
