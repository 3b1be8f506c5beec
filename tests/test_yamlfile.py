"""YAML reads as people mean it, and mistakes get one line."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.yamlfile import dump_yaml, parse_yaml, read_mapping


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("3E-4", 3e-4),
        ("1e4", 1e4),
        ("1e+4", 1e4),
        ("-1e-08", -1e-8),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5", -0.5),
        ("0.1", 0.1),
        ("10", 10),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("32_768", 32768),
        ("1_000.5", 1000.5),
        (".inf", float("inf")),
        ("-.INF", -float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_plain_numbers_and_constants(text: str, value: Any) -> None:
    for parsed in (parse_yaml(text, "x"), (parse_yaml(f"[{text}, x]", "x") or [None])[0] if text else None):
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "word",
    [
        *("on", "off", "yes", "no", "On", "OFF", "Yes", "NO", "y", "n", "tRUE", "flash"),
        *("e4", "1e", "1e-4x", "1:30", "2026-01-31", "0x1F", "0o17", "1.2.3", "--3", "inf", "nan", "<<", "="),
    ],
)
def test_words_stay_words(word: str) -> None:
    assert parse_yaml(f"key: {word}", "x") == {"key": word}
    assert parse_yaml(f"[{word}, default]", "x") == [word, "default"]


@pytest.mark.parametrize("text", ["'1e-4'", '"off"', "'false'", "'10'", "'null'", "''"])
def test_quotes_make_text(text: str) -> None:
    assert parse_yaml(text, "x") == text[1:-1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", 3),
        ("top:\n  lr: 1\n  b: 2\n  lr: 1\n", 4),
        ("- {a: 1, a: 1}\n", 1),
        ("a: 1\n'a': 2\n", 2),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^file\.yaml: line {line}: the key '(a|lr)' stands twice"):
        parse_yaml(text, "file.yaml")


@pytest.mark.parametrize("text", ["1: a", "true: a", "null: a", "[a]: b", "{a: b}: c", "1e-4: a"])
def test_keys_are_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x: line 1: "):
        parse_yaml(text, "x")


@pytest.mark.parametrize(
    "text",
    [
        *("a: b: c", "[1", "{", "a:\n\t- b", "--- 1\n--- 2", "*nowhere", "%", "a\0b"),
        *("!!python/object:os.system x", "!!bool x", "!!int x", "!!float x", "!!timestamp x", "!!binary é"),
        pytest.param("9" * 5000, id="a number of 5000 digits"),
        pytest.param("[" * 1000, id="1000 brackets"),
    ],
)
def test_what_is_no_yaml_gets_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: ") as caught:
        parse_yaml(text, "here")
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="ab:- \n\t[]{}!&*'\"#|>%@`,?01.e~<=\\", max_size=30))
def test_any_text_is_a_value_or_the_users_mistake(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_yaml(text, "x")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.from_regex(r"[-+]?[0-9._]{1,4}(e[-+]?[0-9]{1,2})?", fullmatch=True)
    | st.sampled_from(["off", "no", "true", "null", "~", "1:30", "2026-01-31", "0x1F", "08"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1e-_.08", max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_what_is_dumped_reads_back(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "x") == value
    assert yaml.safe_load(dump_yaml(value)) == value


def test_dumping_keeps_the_order_and_writes_no_aliases() -> None:
    betas = [0.9, 0.95]
    assert list(parse_yaml(dump_yaml({"b": betas, "a": betas}), "x")) == ["b", "a"]
    assert "*" not in dump_yaml({"b": betas, "a": betas})


def test_a_file_may_start_with_a_byte_order_mark_and_end_its_lines_the_windows_way(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: off\r\n")
    assert read_mapping(path) == {"a": 1, "b": "off"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n", "is a list"),
        (b"word", "is a str"),
        (b"a: \xff\n", "cannot be read as text"),
        (None, "no such file"),
    ],
)
def test_a_file_must_hold_keys_and_values(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "file.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_mapping(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mapping(tmp_path)
