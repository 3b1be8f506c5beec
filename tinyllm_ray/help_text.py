"""How the help of a command is laid out: no line is wider than the terminal, and every command in it can be copied.

Standard library only: the supervisor's command line imports this module.
"""

import argparse
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

_NOTE = 6
"""Blanks before what is said of a command."""
_GOES_ON = 10
"""Blanks before the lines on which a command goes on."""
_WORD = r"(?:'[^']*'|\S)+"
_WORDS = re.compile(rf"(?=-){_WORD}(?: (?!-){_WORD})?|{_WORD}")
"""What stays together on a line: an option and its value, or a word of the shell."""


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, for descriptions and epilogs of paragraphs, commands and notes.

    A line with one to five blanks before it is a command; lines with equally many others, or none, are a paragraph.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in _fitted(text, width - len(indent)))

    def _format_usage(self, *arguments: Any, **named: Any) -> str:
        """argparse's, whose lines begin below the first option, or further left where one of them is too wide."""
        usage = super()._format_usage(*arguments, **named)
        fits = max(map(len, usage.splitlines())) <= self._width
        return usage if fits else re.sub(r"\n +", "\n" + " " * _GOES_ON, usage)


def _fitted(text: str, width: int) -> Iterator[str]:
    lines = re.sub(r" \\\n +", " ", text).splitlines()
    for blanks, group in groupby(lines, lambda line: len(line) - len(line.lstrip())):
        if 0 < blanks < _NOTE:
            for line in group:
                yield from _command(line.strip(), blanks, width)
            continue
        for empty, paragraph in groupby(group, lambda line: not line.strip()):
            if empty:
                yield from paragraph
            else:
                yield from _filled(" ".join(line.strip() for line in paragraph), width, blanks, blanks)


def _command(line: str, blanks: int, width: int) -> Iterator[str]:
    """A line of the shell, or more that a shell takes for one."""
    together = " ".join(words.replace(" ", "\0") for words in _WORDS.findall(line))
    lines = _filled(together, width - len(" \\"), blanks, _GOES_ON)
    yield from " \\\n".join(lines).replace("\0", " ").splitlines()


def _filled(text: str, width: int, first: int, others: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 11),  # as argparse has it
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_long_words=False,
        break_on_hyphens=False,
    )
