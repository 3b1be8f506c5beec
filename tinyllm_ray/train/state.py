"""What a run accumulates over its sessions; every checkpoint carries it, and a resumed run goes on from it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """Counts and sums so far. Seconds are of all sessions, except where a run restarts from nothing."""

    step: int = 0
    """Updates made."""
    epochs: int = 0
    """Virtual epochs that ended."""
    evaluated_step: int = 0
    """The step whose evaluation is done: a run may be interrupted between an epoch's last update and that."""
    best: dict[str, Any] | None = None
    """Best subset evaluation: loss, epoch, step."""
    bests: list[dict[str, Any] | None] = field(default_factory=list)
    """The same of each model of a pack whose models are not mixed."""
    stopped: dict[str, int] = field(default_factory=dict)
    """Models of such a pack that went non-finite, and at which update."""
    loss: float | None = None
    """Of the last update, in nats; of a pack the mean."""
    consensus_distance: float | None = None
    """How far apart the models of a mixed pack were at the last update that is evaluated."""
    training_seconds: float = 0.0
    """In updates, without every session's first one, which starts and compiles."""
    training_targets: int = 0
    """Targets of the updates that `training_seconds` counts."""
    elapsed_seconds: float = 0.0
    """From the process's start to the present, or to the checkpoint for earlier sessions."""
    data_wait_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    start_seconds: float = 0.0
    """From every session's process start to the end of its first update."""
    failed_checkpoints: int = 0
    sessions: int = 1
