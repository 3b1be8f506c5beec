"""Which kernels a training runs, beside those that its study promised: seen once, in a few of its own updates."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tinyllm_ray.measure.kernels import KernelProfile, attention_backend, by_category, match, record_kernels
from tinyllm_ray.promise import Promise
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

log = logging.getLogger(__name__)

_PROFILED_UPDATES = 3
_LIMIT_SECONDS = 1.0

_PROFILERS_WORDS = "KINETO_LOG_LEVEL"
_NONE_OF_THEM = "6"
"""PyTorch 2.13's profiler writes lines on standard error where it starts and stops, at a level above its errors'."""

_TELLING_SHARE = 0.05
"""Of an update's kernel time: a kind of kernel that takes less may come and go by an update's own."""


@dataclass(frozen=True)
class Proved:
    """What was seen."""

    line: str
    """For people."""
    updates: int
    """That were profiled."""
    attention: tuple[str, ...]
    """SDPA backends that ran."""
    promised_attention: tuple[str, ...]
    milliseconds: float
    """Kernel time of an update."""
    faults: tuple[str, ...]
    """Where it is not what was promised, or asked for."""


def prove(trainer: Trainer, promise: Promise | None, most_updates: int) -> tuple[Proved, list[Statistics]]:
    """Profile one to three of the next updates of `trainer`, `most_updates` at most.

    They are updates like any other, whose statistics come back in order. Without `promise` only the attention asked for
    is looked for. A profiler that fails costs the proof, and what an update raises is raised.
    """
    made: list[Statistics] = []
    stepped = True

    def step() -> None:
        nonlocal stepped
        stepped = False
        made.append(trainer.step())
        stepped = True

    os.environ.setdefault(_PROFILERS_WORDS, _NONE_OF_THEM)  # read at a process's first profile
    try:
        updates = min(most_updates, _PROFILED_UPDATES)
        profile = record_kernels(step, trainer.synchronize, trainer.device, updates, _LIMIT_SECONDS)
    except Exception as error:
        if not stepped:
            raise
        log.exception("the profiler failed")
        made = made or [trainer.step()]
        return _unproved(f"{type(error).__name__}: {error}".splitlines()[0], promise), made
    return _compare(trainer, promise, profile), made


def _compare(trainer: Trainer, promise: Promise | None, profile: KernelProfile) -> Proved:
    config = trainer.config
    if config.packing.models > 1 and config.packed_backward == "processes":
        return _unproved("the models run in processes of their own", promise)
    seen = tuple(sorted(attention_backend(profile.kernels)))
    faults = [fault] if (fault := match(config.execution.sdpa_backend, profile.kernels)) else []
    times: dict[str, float] = {name: time for name, (time, _) in by_category(profile.kernels).items() if time}
    if not profile.kernels:
        faults.append(f"{_PROFILERS_WORDS}=4 has the profiler say why")
    if promise is not None:
        if promise.attention and seen != promise.attention:
            faults.append(f"attention ran on {_names(seen)}, and {_names(promise.attention)} was promised")
        faults += _differences(times, promise.kernel_milliseconds)
    total = sum(times.values())
    counted = f"{profile.updates} update{'s' * (profile.updates > 1)}"
    how = f"kernels of {counted}: attention on {_names(seen)}, {total:.2f} ms an update"
    if promise is not None:
        how += f", {sum(promise.kernel_milliseconds.values()):.2f} in the study"
    word = "promised" if promise is not None else "asked for"
    line = f"{how}; not what was {word}: {'; '.join(faults)}" if faults else f"{how}, as {word}"
    return Proved(line, profile.updates, seen, promise.attention if promise else (), total, tuple(faults))


def _differences(ran: Mapping[str, float], promised: Mapping[str, float]) -> list[str]:
    """Kinds of kernels that take a telling share of an update on one side and are missing on the other."""
    if not promised:
        return []
    gone = [name for name in _telling(promised) if name not in ran]
    come = [name for name in _telling(ran) if name not in promised]
    words = [f"no {name} kernels ran" for name in gone]
    return words + [f"{name} kernels ran, which the study had none of" for name in come]


def _telling(milliseconds: Mapping[str, float]) -> list[str]:
    least = _TELLING_SHARE * sum(milliseconds.values())
    return [name for name, time in milliseconds.items() if time >= least]


def _unproved(why: str, promise: Promise | None) -> Proved:
    return Proved(f"kernels are not proved: {why}", 0, (), promise.attention if promise else (), 0.0, ())


def _names(backends: tuple[str, ...]) -> str:
    return " and ".join(backends) or "nothing known"
