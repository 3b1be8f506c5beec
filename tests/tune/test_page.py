"""The page as a file: complete, self-contained, and safe whatever the records hold."""

import functools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_studies import eventful_study, h200_first_study, write_study

from tinyllm_ray.tune.page.study import page_data
from tinyllm_ray.tune.page.svg import COLOURS
from tinyllm_ray.tune.page.write import study_page, write_page


class Outline(HTMLParser):
    """A page's elements with the names of their attributes, its text, and what it refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.text = ""
        self.references: list[str] = []
        self.identifiers: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))
        self.references += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        self.identifiers += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


@functools.cache
def eventful_page() -> str:
    return study_page(page_data(*eventful_study()))


def test_the_page_needs_no_other_file_no_network_and_no_script() -> None:
    page = eventful_page()
    outline = Outline(page)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, *_ in outline.elements}
    assert all(one.startswith(("#", "data:")) for one in outline.references)
    assert not any(name.startswith("on") for _, *names in outline.elements for name in names)
    assert "url(http" not in page
    assert "@import" not in page


def test_every_part_is_there_for_a_study_in_which_everything_happened() -> None:
    text = Outline(eventful_page()).text
    for part in (
        "Where the time went",
        "Throughput by factor",
        "Kernel time",
        "Memory",
        "Device speed",
        "Winners by length of training",
        "Verification",
        "All candidates",
        "Study and environment",
        "with 90% confidence, in 4 pairs",
        "95.1% slow",
        "why it is out_of_memory",
        "versions.torch",
        "10 B",
    ):
        assert part in text
    assert "No kernels were recorded" not in text


def test_identifiers_are_unique_and_every_reference_is_to_one_of_them() -> None:
    outline = Outline(eventful_page())
    assert len(outline.identifiers) == len(set(outline.identifiers))
    assert {one[1:] for one in outline.references if one.startswith("#")} <= set(outline.identifiers)


def test_colours_and_fonts_are_the_style_sheets_so_that_dark_mode_is_dark() -> None:
    page = eventful_page()
    body = page.partition("</style>")[2]
    assert not any(colour in body for colour in COLOURS.values())
    assert "fill: #" not in body
    assert "stroke: #" not in body
    assert "font-family" not in body
    assert "font:" not in body
    assert set(re.findall("font-size: [^;]*", body)) == {"font-size: 10px", "font-size: 11px", "font-size: 12px"}
    assert all(f"--{name}:" in page for name in COLOURS)


def test_text_in_pictures_stays_text_and_marks_say_what_they_are() -> None:
    page = study_page(page_data(*h200_first_study()))
    assert ">micro batch size</text>" in page
    assert "<title>micro_batch_size 32: mb32 compiled default cudnn t1, 1.89 M targets/s (selected)</title>" in page


@settings(max_examples=3, derandomize=True)
@given(st.text(min_size=1, max_size=30))
@example("""</title></text></svg></style>"><script>alert(1)</script><img src=x ' onload='alert(1)""")
@example("$x^2$ \\frac{{ 7 }} {% raw %} &amp; &lt; #01f000 a\x00\x0b\x1b\r\n\tb\ufffe")
def test_no_text_from_the_records_becomes_markup(text: str) -> None:
    hostile = Outline(study_page(page_data(*eventful_study(text, 4))))
    assert hostile.elements == plain_outline().elements
    assert all(one.startswith(("#", "data:")) for one in hostile.references)


@functools.cache
def plain_outline() -> Outline:
    return Outline(study_page(page_data(*eventful_study("x", 4))))


def test_a_template_or_formula_in_a_label_is_shown_as_it_is() -> None:
    text = Outline(study_page(page_data(*eventful_study("{{7*7}}$x$", 6)))).text
    assert "candidate c00{{7*7}}$x$" in text
    assert "flash{{7*7}}$x$" in text


@pytest.mark.parametrize("records", [0, 1, 5])
def test_a_study_has_a_page_from_its_first_moment(tmp_path: Path, records: int) -> None:
    known, _ = h200_first_study()
    page = write_page(write_study(tmp_path, known[:records], {} if records else None)).read_text()
    assert "No verdict" in page
    assert 'http-equiv="refresh"' in page


def test_a_page_of_a_study_that_is_over_does_not_reload_itself(tmp_path: Path) -> None:
    page = write_page(write_study(tmp_path, *h200_first_study())).read_text()
    assert "refresh" not in page
    assert "Ended: budget: the next candidate needs up to 33 s" in page


def test_equal_records_give_equal_pages(tmp_path: Path) -> None:
    one, two = (write_page(write_study(tmp_path / name, *eventful_study())).read_bytes() for name in "ab")
    assert one == two


def test_a_summary_with_half_a_character_is_written_all_the_same(tmp_path: Path) -> None:
    records, summary = h200_first_study()
    write_study(tmp_path, records, None)
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"verdict": "half \ud83d"}))
    assert "half �" in write_page(tmp_path).read_text()
