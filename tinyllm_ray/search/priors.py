"""What earlier machines showed, as a starting point: first updates, rates, and what each setting did to throughput.

A study begins with these and believes its own records more with every trial. `Priors.without` leaves machines out, so
that a replay of a recorded table is not helped by figures that came from it.

Sources, all for 20m at 32,768 targets an update unless said otherwise:
- GH200, torch 2.14: the reference system's tuning run, and its later figures for the graph of a whole update (131,072
  targets).
- H200, torch 2.11: `tests/benchmarks/results/h200_first_study.json`, `h200_compile_modes.json`, `h200_table.jsonl`,
  `h200_study.json`, and an ordinary PyTorch training loop for SDPA backends over caches of their own.
- Two x86 CPU cores, torch 2.13, nano: 16 s cold and 2 s warm in default mode, an update 0.56 s eager, 0.32 s compiled.
"""

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinyllm_ray.search.earlier import EarlierStudy
from tinyllm_ray.search.fitting import DeviceKind

Level = tuple[str, Any]
"""A dimension of the model and one of its values, like ("sdpa_backend", "flash")."""


@dataclass(frozen=True, eq=False)
class Machine:
    """What one machine showed."""

    name: str
    device_kind: DeviceKind
    cold_seconds: Mapping[str, float]
    """First update beside the update itself, by kind of execution (`kinds.kind_of`), its compilation not cached."""
    warm_seconds: Mapping[str, float]
    work_per_second: Mapping[str, float]
    """Parameters times targets a second, eager and compiled."""
    effects: Mapping[Level, float]
    """Logarithm of throughput relative to the plain level of the dimension, at the largest micro-batch."""
    half_rows: Mapping[str, float]
    """Rows of a 20m micro-batch below which launching its kernels takes longer than running them, by kind."""


GH200 = Machine(
    name="gh200",
    device_kind="cuda",
    cold_seconds={"eager": 0.6, "default": 18.2, "reduce-overhead": 15.0, "max-autotune": 129.1},
    warm_seconds={"eager": 0.6, "default": 3.3, "max-autotune": 2.8},
    work_per_second={"eager": 1.27e13, "compiled": 2.58e13},
    effects={
        ("kind", "eager"): -0.71,
        ("kind", "reduce-overhead"): -0.03,
        ("kind", "max-autotune"): 0.01,
        ("kind", "graph"): 0.06,
        ("sdpa_backend", "cudnn"): 0.0,
        ("cpu_threads", 1): 0.004,
    },
    half_rows={"eager": 20.0, "default": 14.0, "graph": 3.0},
)

H200 = Machine(
    name="h200",
    device_kind="cuda",
    cold_seconds={"eager": 0.6, "default": 20.5, "reduce-overhead": 21.0},
    warm_seconds={"eager": 0.5, "default": 3.7},
    work_per_second={"eager": 1.66e13, "compiled": 3.84e13},
    effects={
        ("kind", "eager"): -0.84,
        ("kind", "reduce-overhead"): 0.0,
        ("kind", "graph"): 0.0,
        ("sdpa_backend", "cudnn"): 0.0,
        ("sdpa_backend", "flash"): -0.06,
        ("sdpa_backend", "flash4"): 0.02,
        ("sdpa_backend", "flex"): -0.05,
        ("sdpa_backend", "efficient"): -0.22,
        # Kernels, the stream and flash4: between what each gave alone and what it gave where all others were on.
        ("loss_kernel", "triton"): 0.085,
        ("optimizer_kernel", "triton"): 0.02,
        ("norm_kernel", "triton"): 0.025,
        ("rotary_kernel", "triton"): 0.015,
        ("activation_kernel", "triton"): 0.04,
        ("residual_dtype", "bfloat16"): 0.04,
        ("cpu_threads", 1): 0.0,
    },
    half_rows={"eager": 17.0, "default": 20.0, "reduce-overhead": 7.6, "graph": 6.0},
)

X86 = Machine(
    name="x86",
    device_kind="cpu",
    cold_seconds={"eager": 0.5, "default": 16.0},
    warm_seconds={"eager": 0.5, "default": 2.0},
    work_per_second={"eager": 8e9, "compiled": 1.2e10},
    effects={("kind", "default"): 0.56},
    half_rows={},
)

GUESSED_COLD_SECONDS: Mapping[DeviceKind, Mapping[str, float]] = {
    "cuda": {"eager": 1.0, "default": 25.0, "reduce-overhead": 25.0, "max-autotune": 130.0},
    "cpu": {"eager": 1.0, "default": 20.0, "reduce-overhead": 20.0, "max-autotune": 30.0},
}
"""For kinds that no machine has recorded, and machines that are left out."""
GUESSED_WARM_SECONDS = {"eager": 1.0, "default": 4.0}
GUESSED_WORK: Mapping[DeviceKind, Mapping[str, float]] = {
    "cuda": {"eager": 1.2e13, "compiled": 2.5e13},
    "cpu": {"eager": 8e9, "compiled": 1.2e10},
}
GUESSED_HALF_ROWS: Mapping[DeviceKind, Mapping[str, float]] = {
    "cuda": {"eager": 16.0, "default": 16.0, "reduce-overhead": 6.0, "max-autotune": 6.0, "graph": 5.0},
    "cpu": {},
}

GUESSED_EFFECTS: Mapping[DeviceKind, Mapping[Level, tuple[float, float]]] = {
    "cuda": {
        ("kind", "eager"): (-0.6, 0.3),
        ("kind", "reduce-overhead"): (0.0, 0.1),
        ("kind", "max-autotune"): (0.01, 0.03),
        ("kind", "max-autotune-no-cudagraphs"): (0.01, 0.03),
        ("kind", "graph"): (0.02, 0.06),
        ("kind", "graph max-autotune-no-cudagraphs"): (0.03, 0.07),
        ("sdpa_backend", "math"): (-0.5, 0.2),
        ("sdpa_backend", "cudnn"): (0.0, 0.06),
        ("sdpa_backend", "flash"): (-0.03, 0.08),
        ("sdpa_backend", "flash3"): (0.0, 0.08),
        ("sdpa_backend", "flash4"): (0.0, 0.08),
        ("sdpa_backend", "efficient"): (-0.1, 0.12),
        ("sdpa_backend", "flex"): (-0.1, 0.12),
        ("loss_kernel", "triton"): (0.08, 0.07),
        ("optimizer_kernel", "triton"): (0.05, 0.04),
        ("norm_kernel", "triton"): (0.02, 0.03),
        ("rotary_kernel", "triton"): (0.015, 0.03),
        ("activation_kernel", "triton"): (0.015, 0.03),
        ("residual_dtype", "bfloat16"): (0.06, 0.05),
        ("recompute_activations", True): (-0.2, 0.1),
        ("deterministic", True): (-0.05, 0.05),
    },
    "cpu": {
        ("kind", "default"): (0.4, 0.3),
        ("kind", "reduce-overhead"): (0.4, 0.3),
        ("kind", "max-autotune"): (0.4, 0.3),
        ("sdpa_backend", "flash"): (0.0, 0.05),
        ("sdpa_backend", "math"): (-0.2, 0.2),
    },
}
"""Mean and standard deviation where no machine has measured a level. The kernels' and the residual's are three quarters
of what the bytes that they save promise of an H200's update of 17.0 ms (loss 2.7, norms, rotary positions, SwiGLU,
casts and optimizer 6): 1.92 M targets/s to 2.65 M with all."""

UNKNOWN_EFFECT: Mapping[str, float] = {
    "cpu_threads": 0.01,
    "prefetch_depth": 0.003,
    "micro_batch_size": 0.05,
}
"""Standard deviation of levels nobody has a guess for; 0.1 for a dimension that is not named here."""

NEW_MACHINE_SHARE = 0.1
NEW_MACHINE_SD: Mapping[str, float] = {"kind": 0.08, "sdpa_backend": 0.035, "cpu_threads": 0.01}
"""By how much an effect differs from machine to machine, of its size and at least: eager was 0.71 and 0.84 below
compiled on two, graphs of whole updates 0.06 and 0.0 above it, graphs of single operators 0.03 and 0.0 below. Wider
than these say: a study that believes a prior too much never finds out, one that doubts it loses a measurement."""


@dataclass(frozen=True)
class Priors:
    """The figures of some machines for one kind of device."""

    device_kind: DeviceKind
    machines: tuple[Machine, ...] = (GH200, H200, X86)
    earlier: tuple[EarlierStudy, ...] = ()
    """Studies of other sizes on the machines at hand, oldest first: they say more than any other machine."""

    def without(self, *names: str) -> "Priors":
        """These, as if the machines named had never been seen."""
        return replace(self, machines=tuple(machine for machine in self.machines if machine.name not in names))

    def effect(self, level: Level) -> tuple[float, float]:
        """Mean and standard deviation of what a level does to the logarithm of throughput."""
        return _effect(self, level)

    def half_rows(self, kind: str, parameters: int) -> float:
        """Rows of a micro-batch at which launches and kernels of a kind take equally long; 0 where launches are free.

        A larger model has fewer of them: its kernels grow with its parameters, their number only with its layers.
        """
        return _half_rows(self, kind, parameters)

    def first_update_seconds(self, kind: str) -> tuple[float, float]:
        """Cold and warm first update, beside the update itself: the slower of the machines', as upper bounds need."""
        return _first_update_seconds(self, kind)

    def work_per_second(self, update: str) -> float:
        """Parameters times targets a second."""
        return _work_per_second(self, "eager" if update == "eager" else "compiled")

    def _own(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.device_kind == self.device_kind)


@functools.lru_cache(4096)
def _effect(priors: Priors, level: Level) -> tuple[float, float]:
    dimension, _ = level
    seen = [machine.effects[level] for machine in priors._own() if level in machine.effects]
    if seen:
        apart = (max(seen) - min(seen)) / 2
        mean = statistics.mean(seen)
        least = NEW_MACHINE_SD.get(dimension, 0.05)
        between = max(apart, least, NEW_MACHINE_SHARE * abs(mean))
        return mean, between * math.sqrt(1 + 1 / len(seen))  # of one more machine, given the mean of these
    guess = GUESSED_EFFECTS[priors.device_kind].get(level)
    if guess is not None:
        return guess
    if priors.device_kind == "cpu" and dimension == "cpu_threads":
        return 0.0, 0.3
    return 0.0, UNKNOWN_EFFECT.get(dimension, 0.1)


@functools.lru_cache(256)
def _work_per_second(priors: Priors, name: str) -> float:
    seen = [study.work_per_second(name == "eager") for study in priors.earlier]
    if here := [work for work in seen if work is not None]:
        return here[-1]
    rates = [machine.work_per_second[name] for machine in priors._own()]
    return min(rates, default=GUESSED_WORK[priors.device_kind][name])


@functools.lru_cache(256)
def _first_update_seconds(priors: Priors, kind: str) -> tuple[float, float]:
    base = kind.removeprefix("graph ").replace("graph", "default")
    cold = [machine.cold_seconds[base] for machine in priors._own() if base in machine.cold_seconds]
    warm = [machine.warm_seconds[base] for machine in priors._own() if base in machine.warm_seconds]
    here = [sample for study in priors.earlier for sample in study.first_updates if sample.kind == kind]
    warm = [sample.beside_update for sample in here if sample.warm or base == "eager"] or warm
    guesses = GUESSED_COLD_SECONDS[priors.device_kind]
    guessed = guesses.get(base, guesses["max-autotune" if base.startswith("max-autotune") else "default"])
    guessed_warm = GUESSED_WARM_SECONDS["eager" if base == "eager" else "default"]
    return max(cold, default=guessed), max(warm, default=guessed_warm)


@functools.lru_cache(4096)
def _half_rows(priors: Priors, kind: str, parameters: int) -> float:
    seen = [machine.half_rows[kind] for machine in priors._own() if kind in machine.half_rows]
    guesses = GUESSED_HALF_ROWS[priors.device_kind]
    rows = statistics.mean(seen) if seen else guesses.get(kind, guesses.get(kind.split()[0], 0.0))
    return float(rows * (20_403_520 / parameters) ** 0.75)


def launch_bound(rows: float, half_rows: float) -> float:
    """Logarithm of throughput at a micro-batch relative to one so large that launching is hidden.

    A cubic mean of the two times fits the recorded sizes to 10%: on a GH200 eager 4 to 32 rows with 20 half rows, on
    an H200 compiled 8 to 64 with 20 to 22.
    """
    return -math.log1p((half_rows / rows) ** 3) / 3
