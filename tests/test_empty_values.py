"""Values that no command line takes, whatever its options are."""

import argparse
from pathlib import Path

import pytest

from tinyllm_ray.command import Parser


def parser() -> Parser:
    made = Parser("prog", "", "")
    made.add_argument("--preset")
    made.add_argument("--container", default="")
    made.add_argument("--out", type=Path)
    made.add_argument("--set", action="append", default=[])
    made.add_argument("--resume", nargs="?", const="")
    made.add_argument("--source", nargs="+")
    made.add_argument("words", nargs=argparse.REMAINDER)
    return made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--preset", ""],
            "--preset: '' is no value, and what a variable of the shell gives that is not set; see prog",
        ),
        (["--preset="], "--preset: '' is no value"),
        (["--out", ""], "argument --out: '' is no value, and what a variable"),
        (["--out="], "--out: '' is no value"),
        (["--set", "a=1", "--set", ""], "--set: '' is no value"),
        (["--source", "here", ""], "--source: '' is no value"),
    ],
)
def test_an_empty_value_is_a_mistake(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A preset that is none would be the default's, an empty folder the one that one is in."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_is_empty_where_it_stands_alone_or_is_left_out_may_be() -> None:
    options = parser().parse_args(["--container", "", "--out", "runs", "--resume", "--", "mine.py", "--name", ""])
    assert (options.container, options.out, options.preset) == ("", Path("runs"), None)
    assert options.resume == ""
    assert options.words[-3:] == ["mine.py", "--name", ""]
    above = Parser("prog", "", "")
    above.add_subparsers(parser_class=lambda prog, **_: Parser(prog, "", "")).add_parser("go").add_argument(
        "-c", default=""
    )
    assert above.parse_args(["go"]).c == ""
