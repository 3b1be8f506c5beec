"""On real terminals: the table fits, what is said stays, and nothing but a terminal gets control codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pseudo_terminal import Screen, Terminal

from tinyllm_ray import journal

FOLDER = Path(__file__).parent
CANDIDATES = 12
COLOUR = re.compile(r"\x1b\[[0-9;]*?(3[0-8]|4[0-8]|9[0-7])[;m]")


def environment(**more: str) -> dict[str, str]:
    unwanted = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"}
    own = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**own, "TERM": "xterm-256color", **more}


def table(columns: int, lines: int = 24, **more: str) -> str:
    """All that a terminal of that size was sent."""
    command = [sys.executable, str(FOLDER / "terminal_table.py"), str(CANDIDATES)]
    terminal = Terminal(command, environment(**more), columns, lines)
    assert terminal.end() == 0, terminal.text
    return terminal.text


@pytest.mark.parametrize("columns", [40, pytest.param(80, marks=pytest.mark.slow), 200])
def test_no_line_of_the_table_is_wider_than_the_terminal(columns: int) -> None:
    text = table(columns)
    drawn = re.sub(r"(budget 45m|a line that is said|ended:)[^\n]*", "", text)  # which wrap, as they are to stay whole
    screen = Screen(drawn)
    assert 0 < screen.width <= columns
    assert Screen(text).cursor_shown
    shown = [line for line in Screen(text).lines if "1.0" in line or "1.1" in line]
    assert len(shown) == 9, "every candidate with a figure once: none drawn twice, none missing"
    assert "longer than a narrow terminal has columns" in text


def test_a_low_terminal_shows_what_runs_and_counts_the_rest() -> None:
    text = table(80, lines=9)
    up = "\x1b[1A\x1b[2K"
    heights = [len(found) // len(up) + 1 for found in re.findall(rf"(?:{re.escape(up)})+", text)]
    assert max(heights) == 8, "a line is left for the cursor, and none is wasted"
    assert re.search(r"and \d+ more: \d+ complete, 1 out_of_memory", text)
    for number in range(CANDIDATES):
        assert f"mb{number} comp" in text, "each was on the screen while it ran"


def test_colours_are_left_out_where_nobody_wants_them() -> None:
    assert COLOUR.search(table(80))
    assert not COLOUR.search(table(80, NO_COLOR="1"))


def test_a_dumb_terminal_gets_a_line_a_change_and_no_control_codes() -> None:
    lines = table(80, TERM="dumb").replace("\r\n", "\n").splitlines()
    assert len(lines) == 3 + 2 * CANDIDATES
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    "more",
    [
        {"FORCE_COLOR": "1", "COLUMNS": "20"},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"TTY_COMPATIBLE": "1"})),
    ],
)
def test_a_log_file_gets_a_line_a_change_and_no_control_codes(tmp_path: Path, more: dict[str, str]) -> None:
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, str(FOLDER / "terminal_table.py"), str(CANDIDATES)]
        subprocess.run(command, stderr=log, env=environment(**more), check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 3 + 2 * CANDIDATES
    assert all(line.isprintable() for line in lines)
    assert lines[1].startswith("[2m05s left] mb0 compiled")
    assert lines[1].endswith(": running  (window 2)")


def begin(folder: Path, *arguments: str) -> Terminal:
    """A study of which three candidates are measured."""
    own = ("--config", "recipe.yaml", "--space", "space.yaml")
    command = [sys.executable, str(FOLDER / "terminal_study.py"), str(folder), "--budget", "1h", *own, *arguments]
    terminal = Terminal(command, environment(TMPDIR=str(folder)), columns=100)
    log = folder / "log.jsonl"
    terminal.read_until(lambda: any(line["kind"] == "waiting" for line in journal.read_lines(log)))
    return terminal


def test_a_terminal_that_goes_away_ends_the_study_with_its_report(tmp_path: Path) -> None:
    assert begin(tmp_path).go_away() == 143
    (folder,) = (tmp_path / "studies").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended"] == "SIGTERM"
    assert summary["selected"] is not None
    assert (folder / "selected.yaml").exists()
    assert len(journal.read_lines(folder / "trials.jsonl")) == 3


def test_ctrl_c_ends_well_and_says_how_to_go_on(tmp_path: Path) -> None:
    terminal = begin(tmp_path, "--runs", "1000000")
    terminal.write(b"\x03")
    assert terminal.end() == 130, terminal.text
    screen = Screen(terminal.text)
    assert screen.cursor_shown
    assert "Traceback" not in terminal.text
    (line,) = (line for line in screen.lines if line.startswith("go on"))
    (folder,) = (tmp_path / "studies").iterdir()
    found = re.fullmatch(r"go on, with 5\dm\d+s left of the budget: (.*)", line)
    assert found, line
    own = "--budget 1h --config recipe.yaml --space space.yaml --runs 1000000"
    assert found[1] == f"python -m tinyllm_ray.tune {own} --out studies/{folder.name} --resume"
    assert len(journal.read_lines(folder / "trials.jsonl")) == 3


@pytest.mark.slow
def test_the_command_it_says_goes_on(tmp_path: Path) -> None:
    terminal = begin(tmp_path, "--out", "a study", "--resume")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() == 143, terminal.text
    (tmp_path / "log.jsonl").unlink()
    (line,) = (line for line in Screen(terminal.text).lines if line.startswith("go on"))
    assert line.endswith(" --budget 1h --config recipe.yaml --space space.yaml --out 'a study' --resume")
    again = begin(tmp_path, "--out", "a study", "--resume")
    again.write(b"\x03")
    assert again.end() == 130, again.text
    assert len(journal.read_lines(tmp_path / "a study" / "trials.jsonl")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["study", "supervisor"])
def test_a_killed_study_leaves_a_terminal_with_its_cursor(tmp_path: Path, killed: str) -> None:
    terminal = begin(tmp_path, "--out", "study")
    assert not Screen(terminal.text).cursor_shown
    (study,) = {int(line["pid"]) for line in journal.read_lines(tmp_path / "log.jsonl") if line["kind"] == "waiting"}
    os.kill(study if killed == "study" else terminal.pid, signal.SIGKILL)
    if killed == "supervisor":
        terminal.read_until(lambda: "its processes are ended" in terminal.text)
    status = terminal.end()
    assert status == (1 if killed == "study" else -signal.SIGKILL)
    assert Screen(terminal.text).cursor_shown
