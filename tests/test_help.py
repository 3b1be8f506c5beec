"""Every command's --help teaches by examples, and every example is one that the command takes."""

import argparse
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

import tinyllm_ray
from tinyllm_ray.cluster.launch import program as job_program
from tinyllm_ray.help_text import HelpFormatter

EXAMPLE = re.compile(r"^  (python -m tinyllm_ray\.\w+(?:[^\\\n]|\\\n)*)", re.MULTILINE)


def programs() -> list[str]:
    """The package's modules that are run."""
    found = [module.name for module in pkgutil.walk_packages(tinyllm_ray.__path__, "tinyllm_ray.") if module.ispkg]
    names = [name for name in found if importlib.util.find_spec(f"{name}.__main__")]
    assert len(names) >= 4
    return names


def main_of(program: str) -> ModuleType:
    return importlib.import_module(f"{program}.__main__")


def commands() -> Iterator[tuple[str, ...]]:
    """Each program, and each command of it, as the words after `python -m`."""
    for program in programs():
        yield (program,)
        main = main_of(program)
        for action in main.build_parser()._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((program, name) for name in action.choices)
        yield from ((program, name) for name in getattr(main, "COMMANDS", {}))


def help_of(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main_of(words[0]).main([*words[1:], "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def examples(text: str) -> list[list[str]]:
    """Program and arguments of each."""
    return [shlex.split(found[1].replace("\\\n", " "))[2:] for found in EXAMPLE.finditer(text)]


class Parsed(Exception):
    """The command would begin now."""


@pytest.fixture
def stops_once_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> NoReturn:
        parse(self, *arguments, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_no_line_of_help_is_wider_than_the_terminal(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert [line for line in help_of(words, capsys).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("columns", ["60", "200"])
@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_shows_examples_that_parse(
    words: tuple[str, ...],
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(words, capsys)
    assert "examples:" in text
    shown = examples(text.partition("examples:")[2])
    own = [line for line in shown if tuple(line[: len(words)]) == words]
    assert own, f"no example of {' '.join(words)} itself"
    request.getfixturevalue("stops_once_parsed")
    for program, *arguments in shown:
        with pytest.raises(Parsed):
            main_of(program).main(arguments)
        if "--" in arguments:  # a command that a job runs
            job = job_program(arguments[arguments.index("--") + 1 :])
            assert job[0] == "-m"
            with pytest.raises(Parsed):
                main_of(job[1]).main(job[2:])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h", "tune"]])
def test_the_package_itself_lists_its_commands_a_line_each(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "tinyllm_ray", *arguments], check=True, capture_output=True, text=True)
    first, *lines = done.stdout.splitlines()
    assert first == "commands, each with its own --help:"
    assert {line.split()[2] for line in lines} == set(programs())
    assert max(map(len, lines)) <= 80
    assert done.stderr == ""


def test_the_package_itself_runs_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm_ray", "tune", "--budget", "1m"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'tune' is no command here; there is python -m tinyllm_ray.tune, .train, ")
    assert done.stderr.count("\n") == 1


def test_what_writes_the_public_docstrings_takes_help_for_no_folder(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("api_pages.py")), "--help"]
    done = subprocess.run(program, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


def test_no_help_waits_for_what_takes_seconds_to_import() -> None:
    code = f"""
import contextlib, importlib, sys
for program, *words in {list(commands())!r}:
    with contextlib.suppress(SystemExit):
        importlib.import_module(program + ".__main__").main([*words, "--help"])
print([name for name in ("torch", "ray", "numpy", "pandas", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("usage: ") == len(list(commands()))
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_examples_of_one_command_are_those_of_its_name() -> None:
    from tinyllm_ray.command import examples_of

    epilog = "examples:\n  python -m p one X\n      first\n  python -m p two one\n  python -m p one\n\nexit status: 0"
    assert examples_of(epilog, "one") == "examples:\n  python -m p one X\n      first\n  python -m p one"


def test_help_keeps_what_belongs_together_and_a_shell_takes_its_commands() -> None:
    epilog = """examples:
  python -m p one --source books/ 'two words.txt' --tokenizer bpe:16000 --out x
      what it does, said on a line
      and on another

One thing.
And another that is long.

Last.
"""
    text = HelpFormatter("p", width=44)._fill_text(epilog, 42, "")
    assert text.splitlines() == [
        "examples:",
        "  python -m p one --source books/ \\",
        "          'two words.txt' \\",
        "          --tokenizer bpe:16000 --out x",
        "      what it does, said on a line and on",
        "      another",
        "",
        "One thing. And another that is long.",
        "",
        "Last.",
    ]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "python -m p --set='two words' --out x",
            ["  python -m p \\", "          --set='two words' \\", "          --out x"],
        ),
        ("python -m p --name it's", ["  python -m p --name it's"]),
        ("python -m p --resume --out 'a b'", ["  python -m p --resume \\", "          --out 'a b'"]),
    ],
)
def test_quotes_of_a_command_are_kept_as_they_are(command: str, lines: list[str]) -> None:
    assert HelpFormatter("p", width=30)._fill_text(f"  {command}", 29, "").splitlines() == lines
