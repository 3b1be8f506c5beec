"""Small caches made by hand, and the default corpus's cache, built once."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import tinyllm_ray
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


@pytest.fixture(scope="session")
def make_cache(tmp_path_factory: pytest.TempPathFactory) -> MakeCache:
    """make_cache(train, shard_tokens=..., vocab_size=..., validation=...) in a folder of its own."""

    def make(
        train: Sequence[int], shard_tokens: int = 100, vocab_size: int = 2**16, validation: Sequence[int] = (1, 2)
    ) -> TokenCache:
        splits = {"train": train, "validation": validation}
        return write_cache(tmp_path_factory.mktemp("cache"), splits, shard_tokens, vocab_size)

    return make


@pytest.fixture(scope="session")
def counting_cache(make_cache: MakeCache) -> TokenCache:
    """1,005 training tokens 0, 1, 2, ... in shards of 100, so that a row's first token says which row it is."""
    return make_cache(range(1005))


@pytest.fixture(scope="session")
def built_cache(built_root: Path) -> TokenCache:
    (folder,) = built_root.glob("[!.]*")
    return open_cache(folder)


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """Lets a child process import the package that is tested, installed or not."""
    package = str(Path(tinyllm_ray.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
