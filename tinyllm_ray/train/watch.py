"""Whether a training keeps what its study promised: kernels once, throughput every five minutes, seconds at its end.

A training without a promise is watched too, and nothing comes of it.
"""

import logging
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from tinyllm_ray.clock import format_duration
from tinyllm_ray.command import say
from tinyllm_ray.config import Config
from tinyllm_ray.records import Device
from tinyllm_ray.train.evaluate import EAGER_EXTRA_SECONDS
from tinyllm_ray.train.graph_update import WARM_UP_UPDATES
from tinyllm_ray.train.proved import Proved, prove
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

log = logging.getLogger(__name__)

WATCHED_SECONDS = 300.0
"""Of training, without evaluations and checkpoints, that a throughput is judged over."""
TOLERANCE = 0.015

EVALUATION_SPEEDUP = 3.0
"""Targets a second of an evaluation over training's: a forward pass is a third of an update's floating point
operations. 3.4 on an H200 (20m: 6.5 M and 1.9 M)."""


@dataclass(frozen=True)
class Phases:
    """Seconds of a training."""

    start: float
    """From the process's start to the end of the first update."""
    training: float
    """Of the other updates."""
    evaluation: float
    checkpoints: float
    total: float


def predict(config: Config, updates: int, evaluated_targets: int, compiled_evaluation: bool) -> Phases:
    """Seconds that a training of so many updates takes by the promise of `config`; nothing is known of checkpoints.

    `evaluated_targets` are those of all evaluations, which are compiled or not whatever training is.
    """
    promise = config.tuned
    assert promise is not None
    training = max(0, updates - 1) * config.targets_per_update / promise.targets_per_second
    evaluation = evaluated_targets / (EVALUATION_SPEEDUP * promise.targets_per_second)
    if promise.device_kind == "cuda" and config.execution.update != "eager" and not compiled_evaluation:
        # The promise is of compiled code, and a GPU is where the difference is large.
        evaluation += evaluated_targets * EAGER_EXTRA_SECONDS
    return Phases(promise.start_seconds, training, evaluation, 0.0, promise.start_seconds + training + evaluation)


def why_not_compared(config: Config, device: Device) -> str | None:
    """Why the promise of `config` says nothing about a training on `device`; None where it does."""
    promise = config.tuned
    assert promise is not None
    if promise.workload != config.workload_identity:
        return "is of other settings: model, packing, execution or tokens an update were changed since"
    if promise.device != device.name:
        return f"is of another device, {promise.device}, and this is {device.name}"
    return None


class Watch:
    """Watches one session of a training, whose device is `device`."""

    def __init__(self, config: Config, device: Device, compiled_evaluation: bool = False) -> None:
        self._config, self._promise, self._compiled_evaluation = config, config.tuned, compiled_evaluation
        self._why_not = why_not_compared(config, device) if config.tuned else None
        self._targets, self._seconds = 0, 0.0
        self._recent_targets, self._recent_seconds = 0, 0.0
        self._warning: str | None = None
        self._proved: Proved | None = None
        self._first: int | None = None

    def begin(self, updates: int, evaluated_targets: int) -> None:
        """Say what is promised for a training of so many updates and targets in evaluations, or why nothing is."""
        promise = self._promise
        if promise is None:
            return
        said = f"{promise.targets_per_second:,.0f} targets/s by study {promise.study}, {promise.candidate}"
        if self._why_not is not None:
            _tell(logging.INFO, f"the promise of {said} {self._why_not}: throughput is not compared with it")
            return
        expected = predict(self._config, updates, evaluated_targets, self._compiled_evaluation)
        notes = [] if promise.verified else ["not verified"]
        if (then := promise.versions.get("torch")) != (here := version("torch")):
            notes.append(f"with torch {then}, and this is {here}")
        _tell(
            logging.INFO,
            f"promised: {', '.join([said, *notes])}; {updates} updates should take {format_duration(expected.total)}, "
            f"{format_duration(expected.evaluation)} of it evaluations",
        )

    def proof_due(self, trainer: Trainer) -> bool:
        """Whether the next updates are to be profiled: once, when a graph would be replayed and no more captured."""
        if self._promise is None or self._proved is not None:
            return False
        if self._first is None:
            self._first = trainer.updates
        return trainer.updates - self._first >= WARM_UP_UPDATES

    def prove(self, trainer: Trainer, most_updates: int) -> list[Statistics]:
        """Profile the next updates, at most so many and one at least, say what ran, and give back what they found."""
        assert self._promise is not None
        self._proved, statistics = prove(trainer, self._promise if self._why_not is None else None, most_updates)
        _tell(logging.WARNING, self._proved.line) if self._proved.faults else log.info("%s", self._proved.line)
        return statistics

    def note(self, targets: int, seconds: float) -> None:
        """Updates of so many targets took so many seconds, evaluations, checkpoints and profiled updates left out."""
        self._targets, self._seconds = self._targets + targets, self._seconds + seconds
        self._recent_targets, self._recent_seconds = self._recent_targets + targets, self._recent_seconds + seconds
        if self._recent_seconds >= WATCHED_SECONDS:
            self._judge(self._recent_targets / self._recent_seconds)
            self._recent_targets, self._recent_seconds = 0, 0.0

    def _judge(self, reached: float) -> None:
        promise = self._promise
        if promise is None or self._why_not is not None or self._warning is not None:
            return
        deviation = reached / promise.targets_per_second - 1
        if abs(deviation) <= TOLERANCE:
            return
        self._warning = (
            f"{reached:,.0f} targets/s over five minutes of training, {abs(deviation):.1%} "
            f"{'more' if deviation > 0 else 'less'} than the {promise.targets_per_second:,.0f} that were promised "
            f"(one process lies in {promise.low:,.0f} to {promise.high:,.0f} with 90%); "
            "look for other work on this machine, for heat and for slow storage, or tune here again"
        )
        _tell(logging.WARNING, self._warning)

    def outcome(self, updates: int, evaluated_targets: int, took: Phases) -> dict[str, Any] | None:
        """What result.json says of the promise, after so many updates and evaluated targets; None without one."""
        promise = self._promise
        if promise is None:
            return None
        compared = self._why_not is None
        reached = self._targets / self._seconds if self._seconds else None
        expected = predict(self._config, updates, evaluated_targets, self._compiled_evaluation)
        return {
            "study": promise.study,
            "candidate": promise.candidate,
            "device": promise.device,
            "not_compared": self._why_not,
            "targets_per_second": promise.targets_per_second,
            "low": promise.low,
            "high": promise.high,
            "reached_targets_per_second": reached,
            "deviation": reached / promise.targets_per_second - 1 if reached and compared else None,
            "warning": self._warning,
            "proof": self._proved and asdict(self._proved),
            "predicted_seconds": asdict(expected) if compared else None,
            "took_seconds": asdict(took),
            "total_deviation": took.total / expected.total - 1 if compared and expected.total else None,
        }


def _tell(level: int, line: str) -> None:
    log.log(level, "%s", line)
    say(line, sys.stderr)
