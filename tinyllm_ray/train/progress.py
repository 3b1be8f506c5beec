"""What a run says about where it is, for whoever shows it."""

from collections.abc import Callable
from typing import NamedTuple


class Starting(NamedTuple):
    """Before the first update."""

    stage: str
    """What takes the time, like `compiling the first update`."""


class Progress(NamedTuple):
    """How far training is."""

    updates: int
    total_updates: int
    loss: float
    """Nats a target, of the latest update."""
    targets_per_second: float


class Evaluating(NamedTuple):
    """How far an evaluation is; it ends with targets equal to total_targets, or with the next word about training."""

    name: str
    """What is evaluated on, like `validation`."""
    targets: int
    total_targets: int


Event = Starting | Progress | Evaluating
OnProgress = Callable[[Event], None]
