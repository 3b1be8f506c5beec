"""Data sets through the `datasets` library: from local folders, as the hub's loading code reads them."""

import json
import sys

import pytest

from tinyllm_ray.data.sources import Meter, SourceOptions, open_source
from tinyllm_ray.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="token caches may lie on a machine whose environment lacks it")

ROWS = {"train": ["one", None, "three\r\n"], "validation": ["four"], "test": ["five"]}


def documents(source):
    return [(split, text.decode()) for split, text in source.read(Meter())]


def open_one(name, **options):
    return open_source([str(name)], SourceOptions(**options))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set as it lies on the hub: a file a split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, texts in ROWS.items():
        path = tmp_path / "set" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in texts))
    return tmp_path / "set"


EXPECTED = [("train", "one"), ("train", ""), ("train", "three\r\n"), ("validation", "four")]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read(folder, streaming):
    source = open_one(f"hf:{folder}", text_column="body", streaming=streaming)
    assert documents(source) == EXPECTED
    assert documents(source) == EXPECTED
    meter = Meter()
    list(source.read(meter))
    assert meter.done == 4
    assert meter.total == (None if streaming else 4)


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_are_chosen(folder, streaming):
    source = open_one(f"hf:{folder}", text_column="body", validation_split="test", streaming=streaming)
    assert documents(source)[-1] == ("validation", "five")
    (folder / "validation.jsonl").unlink()
    source = open_one(f"hf:{folder}", text_column="body", validation_fraction=0.999, streaming=streaming)
    assert {split for split, _ in documents(source)} == {"validation"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is no column 'text'; its columns are body, id: name one with --text-column"),
        ({"text_column": "id"}, "split 'train', row 1, column 'id': holds 1, which is no text"),
        ({"text_column": "body", "train_split": "all"}, "has no split 'all'; it has .*train.*: name one with --train"),
        ({"text_column": "body", "validation_split": "dev"}, "has no split 'dev'; it has .*name one with --valid"),
        ({"text_column": "body", "config": "fr"}, "cannot be loaded: .*fr"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_a_data_set_lacks_is_named(folder, options, said, streaming):
    with pytest.raises(ConfigError, match=said) as raised:
        documents(open_one(f"hf:{folder}", streaming=streaming, **options))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_data_set_that_was_saved_is_read(folder, whole):
    loaded = datasets.load_dataset(str(folder))
    saved = folder.parent / "saved"
    (loaded if whole else loaded["train"]).save_to_disk(str(saved))
    if whole:
        source = open_one(saved, text_column="body")
        assert documents(source) == EXPECTED
    else:
        source = open_one(saved, text_column="body", validation_fraction=0.5)
        assert sorted(text for _, text in documents(source)) == sorted(text for _, text in EXPECTED[:3])
    assert open_one(saved, text_column="body").facts == open_one(saved, text_column="body").facts


@pytest.mark.parametrize("streaming", [False, True])
def test_a_damaged_data_set_is_one_line(folder, streaming):
    (folder / "train.jsonl").write_text('{"body": "one"}\n{"body')
    with pytest.raises(ConfigError, match=r"the data set .* cannot be loaded: .*") as raised:
        documents(open_one(f"hf:{folder}", text_column="body", streaming=streaming))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_saved_data_set_that_is_damaged_is_one_line(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the data set .* cannot be loaded: .*"):
        open_one(tmp_path)


def test_a_name_of_the_hub_is_asked_for_as_it_was_given(monkeypatch):
    asked = []

    def split_names(*arguments, **named):
        asked.append((arguments, named))
        return ["train", "validation"]

    def load(*arguments, **named):
        asked.append((arguments, named))
        return datasets.Dataset.from_dict({"text": [named["split"]]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_one("owner/name", config="en", revision="abc", streaming=True)
    assert documents(source) == [("train", "train"), ("validation", "validation")]
    assert asked[0] == (("owner/name", "en"), {"revision": "abc"})
    assert asked[1] == (("owner/name", "en"), {"split": "train", "revision": "abc", "streaming": True})
    assert source.facts["revision"] == "abc"


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def refuse(*arguments, **named):
        raise ConnectionError("Couldn't reach\n 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    with pytest.raises(ConfigError, match="'owner/name' cannot be loaded: Couldn't reach 'owner/name' on the Hub"):
        open_one("owner/name")


def test_a_stream_that_breaks_is_one_line(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(ConfigError, match="'owner/name' cannot be loaded: gone"):
        documents(open_one("owner/name", streaming=True))


def test_without_the_library_it_is_named(folder, tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "datasets", None)  # as find_spec and import have it where it is missing
    for name in ("owner/name", tmp_path / "saved"):
        with pytest.raises(ConfigError, match="takes the package datasets, which is not installed: pip install data"):
            open_one(name)
