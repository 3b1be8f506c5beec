"""What the package's command lines share: a mistake is one line, and the error's own exit status.

Standard library only: the supervisor's command line imports this module.
"""

import argparse
import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tinyllm_ray.errors import EXIT_SIGINT, EXIT_USER, TinyllmRayError
from tinyllm_ray.help_text import HelpFormatter
from tinyllm_ray.paths import reason, shown, unusable

_MISTAKEN_PATH = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EROFS, errno.ENAMETOOLONG)
"""What the file system says of a path that somebody gave."""
_EMPTY = "'' is no value, and what a variable of the shell gives that is not set"


class Parser(argparse.ArgumentParser):
    """argparse without the usage before an error, and with help that fits the terminal.

    An option goes by its whole name alone: a job's launcher and the line that says how to go on look for it.
    """

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=HelpFormatter, allow_abbrev=False
        )
        # What begins with a minus and a digit is a value, so that `--budget -5m` is answered for what it is.
        self._negative_number_matcher = re.compile(r"-\d")
        self.register("type", Path, _named)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's, which ends where a value is empty, or a path that no file system takes."""
        options = super().parse_args(args, namespace)
        for name, value in vars(options).items():
            if "" in (value if isinstance(value, list) else [value]) and not self._may_be_empty(name):
                self.error(f"{self._shown(name)}: {_EMPTY}")
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str | Path) and (why := unusable(one)):
                    self.error(f"{self._shown(name)} {shown(one)}: {why}")
        return options

    def _may_be_empty(self, name: str) -> bool:
        """Whether that is the option left out or standing alone, or it holds the words of another program."""
        actions = [action for parser in self._all() for action in parser._actions if action.dest == name]
        return any("" in (one.default, one.const) or one.nargs == argparse.REMAINDER for one in actions)

    def _shown(self, name: str) -> str:
        """An option as it is written; what stands without a name by the name it has in the help."""
        written = "--" + name.replace("_", "-")
        return written if any(written in parser._option_string_actions for parser in self._all()) else name.upper()

    def _all(self) -> Iterator[argparse.ArgumentParser]:
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER, f"error: {message}; see {self.prog} --help\n")


def _named(text: str) -> Path:
    """The path `text`; an empty one is no name of the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError(_EMPTY)
    return Path(text)


def examples_of(epilog: str, command: str) -> str:
    """The examples of one command, with what is said of each, out of those of all."""
    kept: list[str] = []
    keep = False
    for line in epilog.partition("examples:\n")[2].partition("\n\n")[0].splitlines():
        if line.startswith("  python "):
            words = line.split()
            keep = len(words) > 3 and words[3] == command
        if keep:
            kept.append(line)
    return "\n".join(["examples:", *kept])


def run_command(commands: Mapping[str, Callable[[list[str]], int]], arguments: list[str], parser: Parser) -> int | None:
    """The exit status of the command that `arguments` begin with; None where they begin with none, but an option."""
    if not arguments or arguments[0].startswith("-"):
        return None
    if arguments[0] not in commands:
        parser.error(f"there is no command {arguments[0]!r}, but {', '.join(commands)}")
    return commands[arguments[0]](arguments[1:])


def say(line: str, stream: TextIO | None = None) -> None:
    """Print to `stream`, else standard output; a reader that is gone (`| head`) is no fault of the command."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes again when it ends


def note(line: str, stream: TextIO | None = None) -> None:
    """A line for the log of work that goes on without it, where it cannot be written: a full disk, a folder away."""
    with contextlib.suppress(OSError):
        say(line, stream)


def exit_status(command: Callable[[], int]) -> int:
    """What `command` returns; for an error meant for the user, its line on standard error and its status.

    What the encoding of standard output lacks is written there as on standard error: a name's `ü` as `\\xfc`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command()
    except KeyboardInterrupt:
        note("ended by SIGINT", sys.stderr)
        return EXIT_SIGINT
    except TinyllmRayError as error:
        note(f"error: {error}", sys.stderr)
        return error.exit_status
    except OSError as error:
        if (mistake := mistaken_path(error)) is None:
            raise
        note(f"error: {mistake}", sys.stderr)
        return EXIT_USER


def mistaken_path(error: OSError) -> str | None:
    """A path that cannot be used as it was given, and why, on one line; None where `error` is of something else."""
    if error.errno not in _MISTAKEN_PATH or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    why = "this name is longer than a file's may be" if error.errno == errno.ENAMETOOLONG else reason(error)
    closed = error.errno in (errno.EACCES, errno.EPERM)
    remedy = "; choose another, or have it opened to you" if closed else ""
    return f"{shown(os.fsdecode(error.filename))}: {why}{remedy}"
