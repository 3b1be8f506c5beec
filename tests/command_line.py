"""A command line of the package, run in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """A command line that has ended."""

    status: int
    output: str


RunModule = Callable[..., Finished]
