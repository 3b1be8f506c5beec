"""The page in a real browser: no errors, nothing beside the screen of a phone, the text there, dark where asked for."""

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsers import find_chromium
from page_studies import eventful_study, h200_first_study, write_run, write_study

from tinyllm_ray.tune.page.run import write_run_page
from tinyllm_ray.tune.page.write import write_page

Look = Callable[[int, bool], tuple[dict[str, Any], str]]

pytestmark = pytest.mark.browser

_PROBE = """<!doctype html><iframe id=page style="border:0" width={width} height=900 src="{page}"></iframe>
<pre id=found></pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, look = one => getComputedStyle(one);
  const box = one => one.getBoundingClientRect();
  const inside = one => one.closest(".scroll") || (box(one).left >= -0.5 && box(one).right <= {width} + 0.5);
  const texts = [...page.querySelectorAll("svg text")];
  for (const one of page.querySelectorAll("details")) one.open = true;
  document.getElementById("found").textContent = JSON.stringify({{
    overflow: page.documentElement.scrollWidth - {width},
    beside: [...page.querySelectorAll("body *")].filter(one => !inside(one)).map(one => one.outerHTML),
    text: page.body.innerText,
    smallest: Math.min(...texts.map(one => box(one).height)),
    background: look(page.body).backgroundColor,
    ink: look(page.body).color,
    drawn: [...new Set(texts.map(one => look(one).fill))],
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = find_chromium()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write_study(tmp_path_factory.mktemp("study"), *eventful_study("<i>&")))


@pytest.fixture(scope="module")
def looks(chromium: str, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Look:
    """The eventful study's page at a width, light or dark; each is looked at once."""
    return functools.cache(
        lambda width, dark: look_at(chromium, page, tmp_path_factory.mktemp("look"), width=width, dark=dark)
    )


def look_at(
    chromium: str, page: Path, folder: Path, width: int = 390, dark: bool = False
) -> tuple[dict[str, Any], str]:
    """What a browser of so many pixels makes of the page, and all that it complained about."""
    probe = folder / "probe.html"
    probe.write_text(_PROBE.format(width=width, page=page.as_uri()))
    command = [
        *(chromium, "--headless", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--dump-dom", probe.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = done.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    for name, letter in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        found = found.replace(name, letter)
    return json.loads(found), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_the_page_fits_its_screen_without_errors(looks: Look, width: int) -> None:
    found, complaints = looks(width, False)
    assert complaints == ""
    assert found["overflow"] <= 0
    assert found["beside"] == []


def test_a_phone_shows_all_of_it_in_letters_that_can_be_read(looks: Look) -> None:
    found, _ = looks(390, False)
    for part in (
        "runs at 1.198",
        "with 90% confidence",
        "Device speed",
        "why it is lost <i>&",
        "parity with float32",
        "10 B",
    ):
        assert part in found["text"]
    assert found["smallest"] >= 10


def test_dark_is_dark_and_light_is_light(looks: Look) -> None:
    light, dark = looks(390, False)[0], looks(390, True)[0]
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(20, 23, 26)"
    assert light["ink"] in light["drawn"]
    assert dark["ink"] in dark["drawn"]
    assert light["ink"] not in dark["drawn"]


def test_a_recorded_study_fits_a_phone(chromium: str, tmp_path: Path) -> None:
    page = write_page(write_study(tmp_path / "study", *h200_first_study()))
    found, complaints = look_at(chromium, page, tmp_path)
    assert (complaints, found["overflow"], found["beside"]) == ("", 0, [])
    assert "mb32 compiled default cudnn t1" in found["text"]


def test_a_runs_page_fits_a_phone(chromium: str, tmp_path: Path) -> None:
    found, complaints = look_at(chromium, write_run_page(write_run(tmp_path)), tmp_path)
    assert (complaints, found["overflow"], found["beside"]) == ("", 0, [])
    assert "9.1000" in found["text"]
    assert "gradient norm" in found["text"]
