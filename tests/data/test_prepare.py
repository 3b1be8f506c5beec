"""Writing caches: tokens are accounted for to the unit, and nothing but the input and the seed decides them."""

import dataclasses
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tinyllm_ray.data import encode as encode_module
from tinyllm_ray.data.cache import Preparation, open_cache
from tinyllm_ray.data.documents import Document
from tinyllm_ray.data.encode import encode
from tinyllm_ray.data.order import Position, Shuffler, ordered_batches
from tinyllm_ray.data.shards import ShardWriter
from tinyllm_ray.data.tokenizer import END_OF_TEXT, open_tokenizer, take_tokenizer, train_tokenizer
from tinyllm_ray.data.write import write_cache
from tinyllm_ray.errors import ConfigError

TEXTS = ["the cat sat", "on the mat", "", f"and {END_OF_TEXT} said", "Grüße, 世界 🎉\n\n\ttabs", "the end"]


def documents(**splits):
    return [Document(split, text.encode()) for split, texts in splits.items() for text in texts]


def write(out, tokenizer, *, shard_tokens=2**20, seed=42, **arguments):
    """A cache of `train=` and `validation=`."""
    splits = {split: arguments.pop(split) for split in ("train", "validation") if split in arguments}
    preparation = Preparation(shuffle_seed=seed, shuffle_buffer_documents=10_000, shard_tokens=shard_tokens)
    return write_cache(
        out, documents(**splits), tokenizer, {}, splits=tuple(splits), preparation=preparation, **arguments
    )


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
    return save(tokenizer, folder)


def save(tokenizer, folder, end="[EOS]"):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
    return open_tokenizer(folder)


def ids(tokenizer, *texts):
    return encode(tokenizer, [text.encode() for text in texts]).tokens.tolist()


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
    cache = write(tmp_path, tokenizer, train=TEXTS, validation=["alone"], shard_tokens=7)
    assert sorted(documents_of(cache)) == sorted(text for text in TEXTS if text)
    assert documents_of(cache, "validation") == ["alone"]
    totals = cache.manifest.splits["train"]
    assert (totals.documents, totals.empty_documents) == (5, 1)
    assert totals.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert totals.tokens == sum(len(ids(tokenizer, text)) for text in TEXTS)
    assert [shard.tokens for shard in cache.shards("train")[:-1]] == [7] * (len(cache.shards("train")) - 1)


def test_special_token_text_inside_a_document_is_text(tokenizer):
    tokens = ids(tokenizer, f"a {END_OF_TEXT} b")
    backend = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    assert tokens.count(tokenizer.end_of_text) == 1
    assert backend.decode(tokens[:-1]) == f"a {END_OF_TEXT} b"


def test_special_token_text_is_text_where_it_is_a_word_of_the_vocabulary(tmp_path):
    words = word_tokenizer(tmp_path / "words", 10)
    assert ids(words, "w2 [EOS] w3", "w4") == [2, 0, 0, 3, 9, 4, 9]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -1.0) for char in "</s>abc▁")]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    saved = save(unigram, tmp_path / "unigram", "</s>")
    assert unigram.encode("a</s>b").ids.count(1) == 1
    tokens = ids(saved, "a</s>b")
    assert tokens.count(1) == 1
    assert tokens[-1] == 1
    assert unigram.decode(tokens[:-1]).replace(" ", "") == "a</s>b"


def test_an_end_of_text_that_is_not_marked_as_special_is_text_too(tokenizer, tmp_path):
    values = json.loads(tokenizer.data)
    (end,) = values["added_tokens"]
    end["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    )
    taken = take_tokenizer(str(tmp_path), None, tmp_path / "taken")
    assert ids(taken, f"a {END_OF_TEXT} b") == ids(tokenizer, f"a {END_OF_TEXT} b")
    assert ids(taken, END_OF_TEXT).count(taken.end_of_text) == 1


@pytest.mark.parametrize("template", ["$A", "w1 $A", "$A [EOS]", "w1 $A [EOS] [EOS]"])
def test_tokenizers_that_add_tokens_add_none(tmp_path, template):
    processor = processors.TemplateProcessing(single=template, special_tokens=[("w1", 1), ("[EOS]", 9)])
    tokenizer = word_tokenizer(tmp_path, 10, processor)
    assert ids(tokenizer, "w2 w3", "", "w4") == [2, 3, 9, 4, 9]


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 65_537, 128_256])
def test_no_id_wraps(tmp_path, vocab_size):
    tokenizer = word_tokenizer(tmp_path / "words", vocab_size)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (vocab_size, vocab_size - 1)
    cache = write(tmp_path / "cache", tokenizer, train=["last w1 last"])
    assert cache.manifest.dtype == ("uint16" if vocab_size <= 65_536 else "uint32")
    assert everything(cache).tolist() == [vocab_size - 2, 1, vocab_size - 2, vocab_size - 1]


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    whole = word_tokenizer(tmp_path, 70_000)
    short = dataclasses.replace(whole, vocab_size=60_000, end_of_text=0)
    with pytest.raises(ConfigError, match="gave the id 69998, its vocabulary ends at 59999"):
        ids(short, "w1 last")
    with pytest.raises(AssertionError):
        ShardWriter(tmp_path, "train", 4, 60_000).append(encode(whole, [b"last"]).tokens)


def test_text_without_a_token_is_an_empty_document(tmp_path):
    encoded = encode(word_tokenizer(tmp_path, 10), [b" \n ", b"w1", b""])
    assert (encoded.tokens.tolist(), encoded.documents, encoded.empty_documents) == ([1, 9], 1, 2)


def test_only_inputs_and_seed_decide(tokenizer, tmp_path, monkeypatch):
    texts = [f"document {number}" for number in range(200)]
    first = write(tmp_path / "a", tokenizer, train=texts, shard_tokens=100)
    monkeypatch.setattr("tinyllm_ray.data.write.BATCH_BYTES", 50)
    with ThreadPoolExecutor(3) as pool:
        write(tmp_path / "b", tokenizer, train=texts, shard_tokens=100, map_batches=pool.map)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    other = write(tmp_path / "c", tokenizer, train=texts, shard_tokens=100, seed=1)
    assert other.identity != first.identity
    assert sorted(documents_of(other)) == sorted(documents_of(first)) == sorted(texts)
    assert documents_of(first) != texts


class Stop(Exception):
    pass


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 200)), max_size=4), st.integers(1, 40))
@example([(1, 20), (1, 100), (1, 40)], 3)
@example([(2, 100), (1, 1), (3, 10)], 5)
@settings(max_examples=15)
def test_wherever_sessions_end_the_bytes_are_the_same(tokenizer, tmp_path_factory, sessions, shard_tokens):
    """Shards shorter and longer than batches, and batches of another size every time."""
    folder = tmp_path_factory.mktemp("sessions")
    splits = {"train": TEXTS * 2, "validation": TEXTS}
    write(folder / "whole", tokenizer, shard_tokens=shard_tokens, **splits)
    for stop, batch_bytes in sessions:

        def ending(function, batches, stop=stop):
            for count, batch in enumerate(batches):
                if count == stop:
                    raise Stop
                yield function(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tinyllm_ray.data.write.BATCH_BYTES", batch_bytes)
            try:
                write(folder / "parts", tokenizer, shard_tokens=shard_tokens, map_batches=ending, **splits)
            except Stop:
                continue
            break
    else:
        write(folder / "parts", tokenizer, shard_tokens=shard_tokens, **splits)
    assert files(folder / "parts") == files(folder / "whole")


def test_long_documents_are_encoded_in_pieces_to_the_same_tokens(tokenizer, monkeypatch):
    long = " ".join(f"the cat's {word}\n  and 12 don't" for word in TEXTS * 50)
    whole = ids(tokenizer, long, "the end")
    calls = []
    monkeypatch.setattr(encode_module, "_PIECE_BYTES", 40)
    monkeypatch.setattr(encode_module, "_GROUP_BYTES", 100)
    pieces = list(encode_module.cut_between_words(long.encode()))
    assert len(pieces) > 100
    assert b"".join(piece for piece, _ in pieces) == long.encode()
    calls = list(encode_module._groups([long.encode()], cuttable=True))
    assert max(sum(len(piece) for piece, _ in group) for group in calls) < 200
    assert ids(tokenizer, long, "the end") == whole


@given(st.text(alphabet=" ab'1\n\té世.", max_size=80))
def test_pieces_change_no_token(tokenizer, text):
    whole = encode(tokenizer, [text.encode()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "_PIECE_BYTES", 3)
        assert encode(tokenizer, [text.encode()]).tokens.tolist() == whole.tokens.tolist()


def test_a_tokenizer_that_may_see_across_words_is_not_given_pieces(tokenizer, tmp_path):
    values = json.loads(tokenizer.data)
    assert encode_module._is_cuttable(values)
    backend = Tokenizer.from_str(tokenizer.data.decode())
    backend.normalizer = normalizers.NFC()
    assert not encode_module._is_cuttable(json.loads(backend.to_str()))
    backend = Tokenizer.from_str(tokenizer.data.decode())
    backend.add_tokens(["cat sat"])
    assert not encode_module._is_cuttable(json.loads(backend.to_str()))
    assert not encode_module._is_cuttable(json.loads(word_tokenizer(tmp_path, 10).data))


def test_batches_can_be_sent_to_other_processes(tokenizer):
    sent = pickle.loads(pickle.dumps(dataclasses.replace(tokenizer, folder=tokenizer.folder / "elsewhere")))
    assert ids(sent, *TEXTS) == ids(tokenizer, *TEXTS)


def test_a_split_without_text_leaves_no_cache(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="the split 'validation' holds no text in 2 documents"):
        write(tmp_path, tokenizer, train=TEXTS, validation=["", ""])
    with pytest.raises(ConfigError, match=r"holds no manifest.json"):
        open_cache(tmp_path)


def test_a_cache_is_not_overwritten(tokenizer, tmp_path):
    write(tmp_path, tokenizer, train=TEXTS)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="holds a token cache already"):
        write(tmp_path, tokenizer, train=TEXTS)
    assert files(tmp_path) == before


def test_two_trainings_give_equal_files(tokenizer, tmp_path):
    assert train_tokenizer(TEXTS * 3, 300, tmp_path).fingerprint == tokenizer.fingerprint
    assert files(tmp_path) == files(tokenizer.folder)
    assert tokenizer.vocab_size == 300


def test_a_tokenizers_library_that_is_missing_is_named(tmp_path, monkeypatch):
    for missing in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, missing, None)  # as find_spec and import have it where it is missing
    with pytest.raises(ConfigError, match="--tokenizer bpe:300 takes the package tokenizers, which is not installed"):
        train_tokenizer(TEXTS, 300, tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer owner/name takes the package transformers, which is not inst"):
        take_tokenizer("owner/name", None, tmp_path)


def test_tokenizers_that_cannot_serve_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocabulary of 256 is too small; use 257 or more"):
        train_tokenizer(TEXTS, 256, tmp_path)
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read"):
        open_tokenizer(tmp_path)
    word_tokenizer(tmp_path, 10)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no end-of-text token"):
        open_tokenizer(tmp_path)


@settings(max_examples=30)
@given(parts=st.lists(st.integers(0, 40), max_size=8), shard_tokens=st.integers(1, 30))
def test_shards_are_cut_wherever_the_tokens_came_apart(tmp_path_factory, parts, shard_tokens):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(parts), dtype=np.uint16)
    told = []
    written = lambda entry, consumed: told.append((entry.file, consumed))  # noqa: E731
    with ShardWriter(folder, "train", shard_tokens, 2**16, written=written) as writer:
        for part in np.split(tokens, np.cumsum(parts)):
            writer.append(part)
        full = len(told)
        entries = writer.close()
    assert full == len(told) == len(tokens) // shard_tokens
    assert b"".join((folder / entry.file).read_bytes() for entry in entries) == tokens.tobytes()
    assert [entry.tokens for entry in entries] == [
        min(shard_tokens, len(tokens) - start) for start in range(0, len(tokens), shard_tokens)
    ]
    assert sorted(folder.iterdir()) == sorted(folder / entry.file for entry in entries)


def shuffled(texts, seed, most_documents, most_bytes=2**30):
    shuffler = Shuffler(seed, most_documents, most_bytes)
    for text in texts:
        yield from shuffler.push(text.encode())
    yield from shuffler.drain()


@given(st.integers(0, 60), st.integers(0, 80), st.integers(0, 60), st.text(max_size=3))
def test_shuffling_loses_nothing_and_holds_no_more_than_its_buffer(count, most_documents, most_bytes, seed):
    taken = []

    def texts():
        for number in range(count):
            taken.append(str(number))
            yield str(number)

    out = []
    for document in shuffled(texts(), seed, most_documents, most_bytes):
        out.append(document.decode())
        held = len(taken) - len(out)
        assert held <= most_documents
        assert held == 0 or sum(map(len, taken)) - sum(map(len, out)) <= most_bytes + 2
    assert sorted(out) == sorted(map(str, range(count)))
    assert out == [text.decode() for text in shuffled(map(str, range(count)), seed, most_documents, most_bytes)]


def test_shuffles_stay_what_they_were():
    # Other numbers here would make another cache of the same documents.
    assert b"".join(shuffled("abcdefghij", "42/train", 4)) == b"adechgjfbi"
    assert b"".join(shuffled("abcdefghij", "42/train", 100, 4)) == b"adechgjfbi"


def test_batches_hold_consecutive_documents():
    plain = Preparation(shuffle_seed=0, shuffle_buffer_documents=0, shard_tokens=1)
    texts = documents(train=["aa", "b", "", "cccc", "d"])
    batches = list(ordered_batches(texts, plain, {"train": Position()}, 3))
    assert [batch.documents for batch in batches] == [[b"aa", b"b"], [b"", b"cccc"], [b"d"]]
    assert [batch.position.documents for batch in batches] == [0, 2, 4]
    again = ordered_batches(texts, plain, {"train": batches[1].position}, 100)
    assert [batch.documents for batch in again] == [[b"", b"cccc", b"d"]]
    assert list(ordered_batches([], plain, {"train": Position()}, 3)) == []


@pytest.mark.parametrize("now", [["aX", "b", "c"], ["a"], []])
def test_another_input_shows_when_it_is_gone_on_with(now):
    plain = Preparation(shuffle_seed=0, shuffle_buffer_documents=0, shard_tokens=1)
    *_, last = ordered_batches(documents(train=["a", "b", "c"]), plain, {"train": Position()}, 1)
    with pytest.raises(ConfigError, match="the input has changed since this preparation began"):
        list(ordered_batches(documents(train=now), plain, {"train": last.position}, 1))
