"""What ends a run, or a model of a pack, because it went non-finite: noted, and said."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from tinyllm_ray.command import say

log = logging.getLogger(__name__)


class Faults:
    """The fault that ends a run, as result.json has it."""

    def __init__(self) -> None:
        self.fault: dict[str, Any] | None = None

    def fail(self, update: int, losses: Sequence[float], where: str, grad_norms: Sequence[float] = ()) -> None:
        """Note what went non-finite, as text, since JSON has no such numbers."""
        loss, norm = (", ".join(map(str, values)) or None for values in (losses, grad_norms))
        where = where.removeprefix(f"update {update}: ")
        log.error("update %d: loss %s, gradient norm %s: %s", update, loss, norm, where)
        self.fault = {"update": update, "loss": loss, "grad_norm": norm, "where": where}


def note_stop(model: int, update: int, where: str) -> None:
    """Say that a model of a pack goes on no more, while the others do."""
    line = f"model {model} stopped at update {update}: {where}"
    log.error(line)
    say(line, sys.stderr)
