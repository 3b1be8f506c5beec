"""Preparation: tokens are accounted for to the unit, and nothing but the input decides them."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import cut_batches, prepare, shuffled
from tinyllm_ray.data.shards import ShardWriter
from tinyllm_ray.data.tokenizer import END_OF_TEXT, SavedTokenizer, encode, open_tokenizer, train_tokenizer
from tinyllm_ray.errors import ConfigError

TEXTS = ["the cat sat", "on the mat", "", f"and {END_OF_TEXT} said", "Grüße, 世界 🎉\n\n\ttabs", "the end"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(TEXTS * 3, 300, tmp_path_factory.mktemp("bpe"))


def word_tokenizer(folder, vocab_size, post_processor=None):
    """Word `wN` is id N; the last id but one is `last`, the last is the end of text."""
    words = {f"w{number}": number for number in range(vocab_size - 2)}
    words |= {"last": vocab_size - 2, "[EOS]": vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post_processor:
        tokenizer.post_processor = post_processor
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "[EOS]"}}')
    return open_tokenizer(folder)


def everything(cache, split="train"):
    return cache.read(split, 0, cache.tokens(split))


def documents_of(cache, split="train"):
    """The decoded documents; the last token must end one."""
    backend = Tokenizer.from_file(str(cache.folder / "tokenizer" / "tokenizer.json"))
    tokens = everything(cache, split)
    ends = np.flatnonzero(tokens == cache.manifest.end_of_text)
    assert ends[-1] == len(tokens) - 1
    return [backend.decode(part.tolist()[:-1], skip_special_tokens=False) for part in np.split(tokens, ends + 1)[:-1]]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_document_and_one_end_of_text(tokenizer, tmp_path):
    cache = prepare(tmp_path, {"train": TEXTS, "validation": ["alone"]}, tokenizer, {}, shard_tokens=7)
    assert sorted(documents_of(cache)) == sorted(text for text in TEXTS if text)
    assert documents_of(cache, "validation") == ["alone"]
    totals = cache.manifest.splits["train"]
    assert (totals.documents, totals.empty_documents) == (5, 1)
    assert totals.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert totals.tokens == sum(len(encode(tokenizer, [text]).tokens) for text in TEXTS)
    assert [shard.tokens for shard in cache.shards("train")[:-1]] == [7] * (len(cache.shards("train")) - 1)


def test_special_token_text_inside_a_document_is_text(tokenizer):
    tokens = encode(tokenizer, [f"a {END_OF_TEXT} b"]).tokens.tolist()
    backend = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    assert tokens.count(tokenizer.end_of_text) == 1
    assert backend.decode(tokens[:-1]) == f"a {END_OF_TEXT} b"


def test_tokenizers_that_add_tokens_add_none(tmp_path):
    template = processors.TemplateProcessing(single="w1 $A [EOS] [EOS]", special_tokens=[("w1", 1), ("[EOS]", 9)])
    tokenizer = word_tokenizer(tmp_path, 10, template)
    assert encode(tokenizer, ["w2 w3", "", "w4"]).tokens.tolist() == [2, 3, 9, 4, 9]


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 65_537, 128_256])
def test_no_id_wraps(tmp_path, vocab_size):
    tokenizer = word_tokenizer(tmp_path / "words", vocab_size)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (vocab_size, vocab_size - 1)
    cache = prepare(tmp_path / "cache", {"train": ["last w1 last"]}, tokenizer, {})
    assert cache.manifest.dtype == ("uint16" if vocab_size <= 65_536 else "uint32")
    assert everything(cache).tolist() == [vocab_size - 2, 1, vocab_size - 2, vocab_size - 1]


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    whole = word_tokenizer(tmp_path, 70_000)
    short = SavedTokenizer(whole.folder, whole.fingerprint, vocab_size=60_000, end_of_text=0)
    with pytest.raises(ConfigError, match="gave the id 69998, its vocabulary ends at 59999"):
        encode(short, ["w1 last"])
    with pytest.raises(AssertionError):
        ShardWriter(tmp_path, "train", 4, 60_000).append(encode(whole, ["last"]).tokens)


def test_only_inputs_and_seed_decide(tokenizer, tmp_path, monkeypatch):
    documents = {"train": [f"document {number}" for number in range(200)]}
    first = prepare(tmp_path / "a", documents, tokenizer, {}, shard_tokens=100)
    monkeypatch.setattr("tinyllm_ray.data.prepare._BATCH_CHARACTERS", 50)
    with ThreadPoolExecutor(3) as pool:
        lazily = {"train": (text for text in documents["train"])}
        prepare(tmp_path / "b", lazily, tokenizer, {}, shard_tokens=100, map_batches=pool.map)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    other = prepare(tmp_path / "c", documents, tokenizer, {}, shard_tokens=100, shuffle_seed=1)
    assert other.identity != first.identity
    assert sorted(documents_of(other)) == sorted(documents_of(first)) == sorted(documents["train"])
    assert documents_of(first) != documents["train"]


def test_batches_can_be_sent_to_other_processes(tokenizer):
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert encode(sent, TEXTS).tokens.tolist() == encode(tokenizer, TEXTS).tokens.tolist()


def test_a_split_without_text_leaves_no_cache(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="the split 'validation' holds no text in 2 documents"):
        prepare(tmp_path, {"train": TEXTS, "validation": ["", ""]}, tokenizer, {})
    with pytest.raises(ConfigError, match=r"holds no manifest.json"):
        open_cache(tmp_path)


def test_a_cache_is_not_overwritten(tokenizer, tmp_path):
    prepare(tmp_path, {"train": TEXTS}, tokenizer, {})
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="holds a token cache already"):
        prepare(tmp_path, {"train": TEXTS}, tokenizer, {})
    assert files(tmp_path) == before


def test_two_trainings_give_equal_files(tokenizer, tmp_path):
    assert train_tokenizer(TEXTS * 3, 300, tmp_path).fingerprint == tokenizer.fingerprint
    assert files(tmp_path) == files(tokenizer.folder)
    assert tokenizer.vocab_size == 300


def test_tokenizers_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocabulary of 256 is too small; use 257 or more"):
        train_tokenizer(TEXTS, 256, tmp_path)
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read"):
        open_tokenizer(tmp_path)
    word_tokenizer(tmp_path, 10)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no end-of-text token"):
        open_tokenizer(tmp_path)


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.integers(0, 40), max_size=8), shard_tokens=st.integers(1, 30))
def test_shards_are_cut_wherever_the_tokens_came_apart(tmp_path_factory, parts, shard_tokens):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(parts), dtype=np.uint16)
    writer = ShardWriter(folder, "train", shard_tokens, 2**16)
    for part in np.split(tokens, np.cumsum(parts)):
        writer.append(part)
    entries = writer.close()
    assert b"".join((folder / entry.file).read_bytes() for entry in entries) == tokens.tobytes()
    assert [entry.tokens for entry in entries] == [
        min(shard_tokens, len(tokens) - start) for start in range(0, len(tokens), shard_tokens)
    ]


@given(st.integers(0, 60), st.integers(0, 80), st.text(max_size=3))
def test_shuffling_loses_nothing_and_holds_no_more_than_its_buffer(count, buffer_documents, seed):
    taken = 0

    def documents():
        nonlocal taken
        for number in range(count):
            taken += 1
            yield str(number)

    out = []
    for document in shuffled(documents(), seed, buffer_documents):
        out.append(document)
        assert taken - len(out) <= buffer_documents
    assert sorted(out) == sorted(map(str, range(count)))
    assert out == list(shuffled(map(str, range(count)), seed, buffer_documents))


def test_shuffles_stay_what_they_were():
    # Other numbers here would make another cache of the same documents.
    assert "".join(shuffled("abcdefghij", "42/train", 4)) == "adechgjfbi"


def test_batches_hold_consecutive_documents():
    assert list(cut_batches(["aa", "b", "", "cccc", "d"], 3)) == [["aa", "b"], ["", "cccc"], ["d"]]
    assert list(cut_batches([], 3)) == []
