"""Writes the script that sbatch gets: `cluster/ray_cluster.sbatch` with a request's options and a site's settings.

sbatch reads its options from comments, where nothing can be quoted, so that a value is either plain or refused; all
else is quoted for the shell. Standard library only.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinyllm_ray.clock import parse_slurm_time
from tinyllm_ray.errors import ConfigError

_WORD = re.compile(r"[A-Za-z0-9_.,:+@%/&|*()\[\]=-]+", re.ASCII)
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=[A-Za-z0-9_.,:+@%/&|*()\[\]=-]+)?", re.ASCII)
_OPTIONS_MARK = "# [options]\n"
_SITE_MARK = "# [site]\n"


@dataclass(frozen=True)
class Request:
    """A job to submit."""

    command: Sequence[str]
    """What runs on the cluster: `tune` and its options."""
    options: Mapping[str, str]
    """Options of sbatch by their long names without the dashes, in their order."""
    further: Sequence[str] = ()
    """Whole options of sbatch, like `--exclusive`."""
    setup: Sequence[str] = ()
    """Lines of shell that run first."""
    modules: Sequence[str] = ()
    python: str | None = None
    launch: Sequence[str] = field(default=())
    """Options of the launcher."""


def render(template: str, request: Request) -> str:
    """The script for a request. Raises ConfigError for a value that would not stay what it is."""
    for mark in (_OPTIONS_MARK, _SITE_MARK):
        if template.count(mark) != 1:
            raise ConfigError(
                f"ray_cluster.sbatch has no line {mark.strip()!r}; take the one that ships with the package"
            )
    options = [f"#SBATCH --{name}={_checked(f'--{name}', value)}\n" for name, value in request.options.items()]
    options += [f"#SBATCH {_option(option)}\n" for option in request.further]
    shell = [_line("setup", line) for line in request.setup]
    shell += [f"module load {quoted('modules', module)}" for module in request.modules]
    if request.python is not None:
        shell.append(f"python={quoted('python', request.python)}")
    if request.launch:
        shell.append("options=(" + " ".join(quoted("option", word) for word in request.launch) + ")")
    shell.append("set -- " + " ".join(quoted("argument", word) for word in request.command))
    before, after = template.split(_OPTIONS_MARK)
    return before + "".join(options) + after.replace(_SITE_MARK, "".join(f"{line}\n" for line in shell))


def quoted(name: str, value: str) -> str:
    """A word for the shell. Raises ConfigError for one with a line break, or another control character."""
    return shlex.quote(_line(name, value))


def check_word(value: str) -> str:
    """A plain value, as an option of sbatch needs it. Raises ValueError for anything else."""
    if not _WORD.fullmatch(value):
        raise ValueError("spaces, quotes and line breaks cannot stand in an option of sbatch; write a plain word")
    return value


def check_line(value: str) -> str:
    """A line of text. Raises ValueError for an empty one, and for control characters."""
    if not value.strip() or not value.isprintable():
        raise ValueError("it has to be one line of printable text")
    return value


def check_option(value: str) -> str:
    """One whole option of sbatch: `--exclusive`, `--reservation=lab`. Raises ValueError for anything else."""
    if not _OPTION.fullmatch(value):
        raise ValueError("an option of sbatch stands in a line of its own, like --exclusive or --reservation=lab")
    return value


def check_duration(value: str) -> str:
    """A time as Slurm has it. Raises ValueError for anything else."""
    try:
        parse_slurm_time(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _checked(name: str, value: str) -> str:
    try:
        return check_word(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {value!r} is not allowed: {error}") from None


def _option(value: str) -> str:
    try:
        return check_option(value)
    except ValueError as error:
        raise ConfigError(f"{value!r} is not allowed: {error}") from None


def _line(name: str, value: str) -> str:
    try:
        return check_line(value) if value else value
    except ValueError as error:
        raise ConfigError(f"{name}: {value!r} is not allowed: {error}") from None
