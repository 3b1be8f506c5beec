"""`python -m tinyllm_ray.data prepare`: the same bytes however it is run, stopped, resumed and moved."""

import contextlib
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tinyllm_ray.data import prepare as prepare_module
from tinyllm_ray.data.__main__ import main
from tinyllm_ray.data.cache import MANIFEST, open_cache
from tinyllm_ray.data.options import build_parser, request_of
from tinyllm_ray.data.prepare import Request, prepare
from tinyllm_ray.data.resume import REQUEST, recorded
from tinyllm_ray.data.tokenizer import train_tokenizer
from tinyllm_ray.data.verify import verify

WORDS = ["liberty", "union", "congress", "treaty", "revenue", "harbor", "commerce", "people", "nation", "peace"]


def text_of(number):
    return " ".join(WORDS[(number * step) % 10] + str(number % 97) for step in range(1, 60))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A megabyte of documents in two formats."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"text": text_of(number)}) + "\n" for number in range(2000)]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(rows[:1000]).encode()))
    (folder / "b.jsonl").write_text("".join(rows[1000:]))
    return folder


def arguments(corpus, out, *more):
    common = ["--validation-fraction", "0.05", "--tokenizer", "bpe:300", "--shard-tokens", "50000"]
    return ["prepare", "--source", str(corpus), "--out", str(out), *common, *map(str, more)]


def run(*command, capsys):
    status = main([str(part) for part in command])
    return status, capsys.readouterr()


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The cache of an uninterrupted run with one worker."""
    out = tmp_path_factory.mktemp("whole") / "cache"
    assert main(arguments(corpus, out, "--workers", 1)) == 0
    return out


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(corpus, whole, tmp_path, workers):
    assert main(arguments(corpus, tmp_path / "cache", "--workers", workers)) == 0
    assert files(tmp_path / "cache") == files(whole)
    assert len([name for name in files(whole) if name.startswith("train-")]) > 5
    assert verify(whole, 2) == []


def test_what_it_leaves_is_a_cache_and_its_request(whole):
    assert [name for name in visible(whole) if not name.endswith(".bin")] == [MANIFEST, REQUEST, "tokenizer"]
    totals = open_cache(whole).manifest.splits
    assert sum(split.documents for split in totals.values()) == 2000
    assert 50 < totals["validation"].documents < 150


def test_a_ray_cluster_makes_the_same_bytes(corpus, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tinyllm_ray.cluster.connect.usable_cores", lambda: 2)
    monkeypatch.setattr("tinyllm_ray.cluster.connect._has_dashboard", lambda: False)  # half of Ray's start
    status, said = run(*arguments(corpus, tmp_path / "cache", "--ray"), capsys=capsys)
    assert status == 0, said
    assert files(tmp_path / "cache") == files(whole)
    status, said = run(*arguments(corpus, tmp_path / "other", "--ray", "--workers", 2), capsys=capsys)
    assert (status, said.err.partition(";")[0]) == (2, "error: --workers is for this machine")


def no_tokenizing(function, batches):
    raise AssertionError("tokenized again")


def test_prepared_again_or_moved_it_is_not_tokenized_again(corpus, whole, tmp_path, monkeypatch, capsys):
    before = files(whole)
    monkeypatch.setattr("tinyllm_ray.data.pool.map_in_processes", no_tokenizing)
    status, said = run(*arguments(corpus, whole), capsys=capsys)
    assert (status, said.out.partition(":")[0]) == (0, f"{whole} holds this cache already")
    moved = tmp_path / "moved"
    whole.rename(moved)
    try:
        assert main(arguments(corpus, moved)) == 0
    finally:
        moved.rename(whole)
    assert files(whole) == before


class Stop(Exception):
    pass


def stopping_after(count):
    def mapped(function, batches):
        for number, batch in enumerate(batches):
            if number == count:
                raise Stop
            yield function(batch)

    return mapped


def request_for(corpus, *more):
    return request_of(build_parser().parse_args(arguments(corpus, "unused", *more)))


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("tinyllm_ray.data.write.BATCH_BYTES", 30_000)


@pytest.mark.parametrize("stops", [[0], [3], [9, 1, 6], [30]])
def test_a_session_that_ended_is_gone_on_with(corpus, whole, tmp_path, stops, small_batches, monkeypatch):
    request, out = request_for(corpus), tmp_path / "cache"
    for batches in stops:
        with pytest.raises(Stop):
            prepare(request, out, map_batches=stopping_after(batches))
        assert not (out / MANIFEST).exists()
        assert not list(out.glob(".*.tmp"))
        # Another size of batches than the session's before: where it goes on must not depend on it.
        monkeypatch.setattr("tinyllm_ray.data.write.BATCH_BYTES", 20_000)
    again = 0

    def counted(function, texts):
        nonlocal again
        for batch in texts:
            again += sum(map(len, batch))
            yield function(batch)

    started = sum(state.counts.text_bytes for state in recorded(out, ("train", "validation")).values())
    cache, there = prepare(request, out, map_batches=counted)
    assert files(out) == files(whole)
    assert not there
    assert again + started == sum(split.text_bytes for split in cache.manifest.splits.values())
    assert (started > 0) == (stops[-1] > 5)


def test_a_shard_that_was_lost_meanwhile_is_written_again(corpus, whole, tmp_path, small_batches):
    request, out = request_for(corpus), tmp_path / "cache"
    with pytest.raises(Stop):
        prepare(request, out, map_batches=stopping_after(30))
    shards = sorted(out.glob("train-*.bin"))
    assert len(shards) > 3
    os.truncate(shards[1], 10)
    (out / ".train-00009.bin.00.tmp").write_bytes(b"left by a process that was killed")
    prepare(request, out)
    assert files(out) == files(whole)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", 1], "preparation.shuffle_seed is 42 there, 1 now"),
        (["--tokenizer", "bpe:400"], "tokenizer is 'bpe:300' there, 'bpe:400' now"),
        (["--validation-fraction", 0.5], "source.validation_fraction is 0.05 there, 0.5 now"),
        (["--text-column", "body"], "source.text_column is 'text' there, 'body' now"),
    ],
)
def test_another_request_is_refused_with_the_difference(corpus, tmp_path, small_batches, more, said, whole, capsys):
    with pytest.raises(Stop):
        prepare(request_for(corpus), tmp_path / "cache", map_batches=stopping_after(9))
    for out in (tmp_path / "cache", whole):
        before = files(out)
        status, shown = run(*arguments(corpus, out, *more), capsys=capsys)
        assert status == 2
        assert shown.err.startswith(f"error: --out {out}: was begun for another request: {said}; ask for the same")
        assert files(out) == before


def test_changed_input_is_refused(corpus, tmp_path, small_batches, capsys):
    source = tmp_path / "corpus"
    source.mkdir()
    for path in corpus.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with pytest.raises(Stop):
        prepare(request_for(source), tmp_path / "cache", map_batches=stopping_after(20))
    text = (source / "b.jsonl").read_bytes()
    middle = text.index(b"union", len(text) // 2)  # where the sample of both ends does not look
    (source / "b.jsonl").write_bytes(text[:middle] + b"onion" + text[middle + 5 :])
    status, said = run(*arguments(source, tmp_path / "cache"), capsys=capsys)
    assert (status, "the input has changed since this preparation began" in said.err) == (2, True)
    (source / "b.jsonl").write_bytes(text[:-30])
    status, said = run(*arguments(source, tmp_path / "cache"), capsys=capsys)
    assert (status, "source.files.b.jsonl is " in said.err) == (2, True)


def test_one_process_prepares_a_folder(corpus, tmp_path, capsys):
    request, out = request_for(corpus), tmp_path / "cache"

    def meanwhile(function, batches):
        status, said = run(*arguments(corpus, out), capsys=capsys)
        assert (status, said.err.partition(";")[0]) == (2, f"error: --out {out}: another process is preparing there")
        yield from map(function, batches)

    prepare(request, out, map_batches=meanwhile)
    assert (out / MANIFEST).exists()


@contextlib.contextmanager
def start(command, child_environment, **named):
    """The command in a process, which does not outlive the test: leaving a Popen would wait for it for ever."""
    with subprocess.Popen(
        [sys.executable, "-m", "tinyllm_ray.data", *command],
        env=child_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **named,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("number", "status", "how"),
    [
        (signal.SIGINT, 130, ["--workers", "2"]),
        (signal.SIGTERM, 143, ["--workers", "2"]),
        pytest.param(signal.SIGTERM, 143, ["--ray"], marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_it_and_the_same_command_goes_on(tmp_path, child_environment, number, status, how):
    source = tmp_path / "input.jsonl"
    command = ["prepare", "--source", str(source), "--out", str(tmp_path / "cache"), *how, "--tokenizer"]
    command += [str(tmp_path / "bpe"), "--shard-tokens", "1000"]
    train_tokenizer([text_of(1)], 300, tmp_path / "bpe")
    rows = "".join(json.dumps({"text": text_of(place)}) + "\n" for place in range(600))
    source.write_text(rows * 50)
    with start(command, child_environment, start_new_session=True) as child:
        while not recorded(tmp_path / "cache", ("train", "validation"))[
            "train"
        ].shards:  # a file is there before its record
            assert child.poll() is None, child.stdout.read()
            time.sleep(0.02)
        if how == ["--ray"]:
            os.kill(child.pid, number)
        else:
            os.killpg(child.pid, number)  # as a terminal and Slurm do it
        said = child.stdout.read()
        assert child.wait() == status, said
    assert said.splitlines()[-1] == f"stopped by {number.name}; the same command goes on from here"
    assert "Traceback" not in said
    assert not (tmp_path / "cache" / MANIFEST).exists()
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert recorded(tmp_path / "cache", ("train", "validation"))["train"].shards


def test_a_full_disk_is_one_clear_line_and_the_folder_goes_on(corpus, whole, tmp_path, child_environment):
    limited = 90_000  # bytes a file: below a shard's 100,000

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limited, limited))

    out = tmp_path / "cache"
    with start(arguments(corpus, out, "--workers", 1), child_environment, preexec_fn=limit) as child:
        said = child.stdout.read()
        assert child.wait() == 2, said
    assert said.splitlines()[-1] == (
        f"error: --out {out}: cannot be written (File too large); what is there is kept: make room and run the same "
        "command again to go on"
    )
    assert not list(out.glob(".*.tmp"))
    assert main(arguments(corpus, out)) == 0
    assert files(out) == files(whole)


def test_the_cache_may_lie_beside_its_documents(corpus, whole, tmp_path, monkeypatch):
    """Where the command runs again it is none of them, though it holds JSON."""
    for file in corpus.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shutil.copytree(whole, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    for source in (".", "./**/*"):
        assert main(arguments(source, "cache")) == 0
    assert files(tmp_path) == before


def test_a_folder_with_other_things_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("mine")
    status, said = run(*arguments(corpus, tmp_path), capsys=capsys)
    assert (status, said.err) == (2, f"error: --out {tmp_path}: holds other files; choose a new or empty folder\n")
    assert visible(tmp_path) == ["notes.md"]
    status, said = run(*arguments(corpus, tmp_path / "notes.md"), capsys=capsys)
    assert (status, "notes.md: cannot be written (File exists)" in said.err) == (2, True)


@pytest.mark.parametrize("text", ["no JSON", "[]", "null"])
def test_a_folder_whose_request_is_damaged_is_refused(corpus, tmp_path, capsys, text):
    (tmp_path / REQUEST).write_text(text)
    status, said = run(*arguments(corpus, tmp_path), capsys=capsys)
    wanted = f"error: {tmp_path / REQUEST}: is damaged; choose another --out, or remove that folder\n"
    assert (status, said.err) == (2, wanted)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tokenizer", "bpe:many"], "--tokenizer bpe:many: bpe: is followed by a number of entries, as in bpe:32000"),
        (["--tokenizer", "bpe:100"], "a byte-level vocabulary of 100 is too small; use 257 or more"),
        (
            ["--tokenizer", "bpe:99_999_999_999"],
            "a byte-level vocabulary of 99,999,999,999 is too large; use 1,048,576",
        ),
        (["--config", "en"], "--config: changes nothing for files; leave it out, or name another --source"),
        (["--streaming"], "--streaming: changes nothing for files;"),
        (
            ["--source", "sotu", "--validation-fraction", "0.1"],
            "--validation-fraction: changes nothing for the default",
        ),
        (
            ["--source", "sotu", "--validation-fraction", "0.01", "--documents", "lines"],
            "--documents and --split-long-documents: changes nothing for",
        ),
        (["--text-column", "body"], "a.jsonl.gz: line 1: there is no column 'body'; its columns are text"),
        (["--validation-fraction", "0.0000001"], "the split 'validation' holds no text in 0 documents"),
        (["--source", "nothing.txt"], "--source nothing.txt: no such file or folder"),
    ],
)
def test_a_mistake_is_one_line(corpus, tmp_path, more, said, capsys):
    status, shown = run(*arguments(corpus, tmp_path / "cache", *more), capsys=capsys)
    last = shown.err.splitlines()[-1]
    assert status == 2
    assert last.startswith("error: ")
    assert said in last


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--workers", "0"], "'0' is no whole number from 1 on"),
        (["--shard-tokens", "many"], "'many' is no whole number from 1 on"),
        (["--documents", "words"], "invalid choice: 'words'"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(corpus, tmp_path, more, said, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments(corpus, tmp_path / "cache", *more))
    error = capsys.readouterr().err
    assert raised.value.code == 2
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_tokenizer_is_taken_over(corpus, whole, tmp_path):
    """As AutoTokenizer loads it, from a folder here."""
    out = tmp_path / "cache"
    assert main(arguments(corpus, out, "--tokenizer", whole / "tokenizer")) == 0
    first, second = open_cache(out), open_cache(whole)
    assert first.identity == second.identity
    assert first.manifest.source["tokenizer"] == str(whole / "tokenizer")


def test_a_tokenizer_that_is_not_there_is_one_line(corpus, tmp_path, capsys):
    status, said = run(*arguments(corpus, tmp_path / "cache", "--tokenizer", tmp_path / "none"), capsys=capsys)
    assert status == 2
    assert said.err.splitlines()[-1].startswith(f"error: --tokenizer {tmp_path / 'none'}: cannot be loaded: ")


@pytest.mark.parametrize("damage", ["no JSON", "{}"])
def test_a_half_done_caches_damaged_tokenizer_is_named(corpus, whole, tmp_path, capsys, damage):
    out = tmp_path / "cache"
    shutil.copytree(whole, out)
    (out / MANIFEST).unlink()
    (out / "tokenizer" / "tokenizer.json").write_text(damage)
    status, said = run(*arguments(corpus, out), capsys=capsys)
    assert status == 2
    assert said.err.splitlines()[-1].startswith(f"error: {out / 'tokenizer'}: holds no tokenizer that can be read: ")


def test_c4_stands_for_its_revisions():
    request = request_of(build_parser().parse_args(["prepare", "--source", "c4", "--out", "x"]))
    assert (request.sources, request.options.config) == (("hf:allenai/c4",), "en")
    assert request.options.revision == "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
    assert request.options.streaming
    assert request.tokenizer == "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
    assert request.tokenizer_revision == "59f6f375b26bde864a6ca194a9a3044570490064"
    assert (request.preparation.shuffle_seed, request.preparation.shuffle_buffer_documents) == (42, 10_000)
    assert request.preparation.shard_tokens == 33_554_432
    own = request_of(build_parser().parse_args(["prepare", "--source", "c4", "--tokenizer", "bpe:500", "--out", "x"]))
    assert (own.tokenizer, own.tokenizer_revision) == ("bpe:500", None)


def test_the_defaults_make_the_default_cache(built_cache, tmp_path):
    options = build_parser().parse_args(["prepare", "--out", str(tmp_path)])
    request = request_of(options)
    assert request == prepare_module.default_request()
    assert request.tokenizer == Request().tokenizer


def test_a_tokenizer_is_trained_on_a_bounded_part(corpus, tmp_path, monkeypatch):
    request = request_for(corpus)
    seen = []
    monkeypatch.setattr(prepare_module, "TRAINING_BYTES", 10_000)
    monkeypatch.setattr(prepare_module, "train_tokenizer", lambda texts, size, folder: seen.extend(texts) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(request, tmp_path / "cache")
    assert sum(map(len, seen)) == 10_000
    assert len(set(seen)) == len(seen)


def test_a_mistake_leaves_what_is_hidden_in_the_folder(corpus, tmp_path, capsys):
    """A folder of git's holds nothing that anybody sees, and all that there is of somebody's work."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (tmp_path / ".notes").write_text("mine")
    assert run(*arguments(corpus, tmp_path), "--text-column", "body", capsys=capsys)[0] == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".git", ".notes", "HEAD"]


def test_a_folder_that_cannot_be_made_is_one_line(corpus, capsys):
    status, said = run(*arguments(corpus, "/proc/nowhere"), capsys=capsys)
    assert status == 2
    assert said.err.splitlines()[-1].startswith("error: --out /proc/nowhere: cannot be written (")
    assert said.err.endswith("; choose another folder\n")


@pytest.mark.parametrize("there_before", [False, True])
def test_a_mistake_leaves_nothing_so_that_the_corrected_command_runs(corpus, tmp_path, there_before, capsys):
    out = tmp_path / "out"
    if there_before:
        out.mkdir()
    wrong = run(*arguments(corpus, out), "--text-column", "body", capsys=capsys)
    assert wrong[0] == 2
    assert "its columns are text" in wrong[1].err
    assert out.exists() == there_before
    assert not there_before or list(out.iterdir()) == []
    assert run(*arguments(corpus, out), capsys=capsys)[0] == 0


@pytest.mark.parametrize("command", [["info", "--rows", "5"], ["verify"]])
def test_a_reader_that_is_gone_is_no_fault(whole, command):
    """As `| head` is after its lines."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as gone:
        program = [sys.executable, "-m", "tinyllm_ray.data", *command, str(whole)]
        done = subprocess.run(program, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_preparation_whose_progress_nobody_reads_goes_on(corpus, whole, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as gone:
        program = [sys.executable, "-m", "tinyllm_ray.data", *arguments(corpus, tmp_path / "cache", "--workers", 1)]
        done = subprocess.run(program, stdout=gone, stderr=gone, check=False)
    assert done.returncode == 0
    assert files(tmp_path / "cache") == files(whole)
