"""Tables made by formula: main effects, interactions and failures drawn once a table, wider than any prior says."""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from replay_machine import Row, Table

from tinyllm_ray.config import load
from tinyllm_ray.records import Fate
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.kinds import kind_of
from tinyllm_ray.search.space import Space, load_space

KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel", "activation_kernel", "optimizer_kernel")
COLD = {"eager": 0.8, "default": 20.0, "reduce-overhead": 21.0, "graph": 21.0, "max-autotune": 130.0}
WARM = {"eager": 0.8, "default": 3.7, "reduce-overhead": 4.0, "graph": 4.5, "max-autotune": 3.5}


def kernel_space(
    kernels: tuple[str, ...], modes: tuple[str, ...] = ("default", "reduce-overhead"), preset: str = "20m-32k"
) -> FittedSpace:
    """Micro-batches, kinds, backends and Triton kernels, for a preset of 32,768 targets an update."""
    factors: dict[str, list[Any]] = {
        "micro_batch_size": [4, 8, 16, 32],
        "update": ["eager", "compiled", "graph"],
        "compile_mode": list(modes),
        "sdpa_backend": ["auto", "flash", "efficient"],
    }
    factors |= {kernel: ["torch", "triton"] for kernel in kernels}
    space = Space.model_validate(
        {
            "name": "kernels",
            "baseline": {"update": "compiled"},
            "factors": factors,
            "when": {"compile_mode": {"update": ["compiled"]}},
        }
    )
    return fit_space(space, load(preset), "cuda", 16)


def factorial(name: str, seed: int, kernels: tuple[str, ...] = KERNELS, failures: bool = True) -> Table:
    """Effects of every kind drawn from `seed`.

    With failures one kernel gives wrong numbers with one backend, another fails inside CUDA graphs of single
    operators, and eager updates of 32 rows run out of memory unless their loss is Triton's.
    """
    dice = random.Random(f"factorial {seed}")
    base = math.log(dice.uniform(1.2e6, 2.0e6))
    kinds = {
        "eager": dice.gauss(-0.8, 0.1),
        "default": 0.0,
        "reduce-overhead": dice.gauss(0.0, 0.04),
        "graph": dice.gauss(0.03, 0.04),
        "max-autotune": dice.gauss(0.01, 0.02),
    }
    half = {"eager": dice.uniform(12, 24), "default": dice.uniform(10, 24)}
    graph_half = dice.uniform(3, 9)
    backends = {"auto": 0.0, "flash": dice.gauss(-0.04, 0.05), "efficient": dice.gauss(-0.15, 0.08)}
    gains = {kernel: dice.gauss(0.03, 0.05) for kernel in kernels}
    pairs = {pair: dice.gauss(0.0, 0.015) for pair in itertools.combinations(kernels, 2)}
    with_kind = {(kernel, kind): dice.gauss(0.0, 0.02) for kernel in kernels for kind in ("eager", "graph")}
    wrong, failing = dice.choice(kernels), dice.choice(kernels)

    def row(execution: Mapping[str, Any]) -> Row:
        kind, size = kind_of(execution), execution["micro_batch_size"]
        on = [kernel for kernel in kernels if execution[kernel] == "triton"]
        log = base + kinds[kind] + backends[execution["sdpa_backend"]]
        log -= math.log1p((half.get(kind, graph_half) / size) ** 3) / 3 - 0.03 * math.log2(size)
        log += sum(gains[kernel] + with_kind.get((kernel, kind), 0.0) for kernel in on)
        log += sum(pairs[pair] for pair in itertools.combinations(on, 2))
        fate = Fate.COMPLETE
        if failures and wrong in on and execution["sdpa_backend"] == "flash":
            fate = Fate.INVALID
        elif failures and failing in on and kind == "reduce-overhead":
            fate = Fate.FAILED
        elif failures and kind == "eager" and size == 32 and execution["loss_kernel"] == "torch":
            fate = Fate.OUT_OF_MEMORY
        memory = 8e9 * size / 32 * (3 if kind == "eager" else 1)
        return Row(math.exp(log), cold=COLD[kind], warm=WARM[kind], fate=fate, memory=memory)

    return _table(name, kernel_space(kernels), row)


def flat(name: str = "flat") -> Table:
    """Nothing is better than the baseline by more than noise; much is worse."""

    def row(execution: Mapping[str, Any]) -> Row:
        kind, size = kind_of(execution), execution["micro_batch_size"]
        log = math.log(1.9e6) - (0.8 if kind == "eager" else 0.0) - math.log1p((18 / size) ** 3) / 3
        log -= {"auto": 0.0, "flash": 0.06, "efficient": 0.2}[execution["sdpa_backend"]]
        log -= 0.01 * sum(execution[kernel] == "triton" for kernel in KERNELS[:3])
        return Row(math.exp(log), cold=COLD[kind], warm=WARM[kind])

    return _table(name, kernel_space(KERNELS[:3], ("default", "reduce-overhead", "max-autotune")), row)


def trap(name: str = "trap") -> Table:
    """The best is two kernels that each lose alone, under a graph of the whole update."""

    def row(execution: Mapping[str, Any]) -> Row:
        kind, size = kind_of(execution), execution["micro_batch_size"]
        loss, norm = (execution[kernel] == "triton" for kernel in ("loss_kernel", "norm_kernel"))
        log = math.log(1.6e6) - (0.8 if kind == "eager" else 0.0)
        log -= math.log1p(((4 if kind == "graph" else 18) / size) ** 3) / 3
        log -= {"auto": 0.0, "flash": 0.03, "efficient": 0.1}[execution["sdpa_backend"]]
        log += 0.2 if loss and norm else -0.04 * (loss + norm)
        log += 0.05 if kind == "graph" else 0.0
        return Row(math.exp(log), cold=COLD[kind], warm=WARM[kind])

    return _table(name, kernel_space(KERNELS[:3]), row)


def two_cores(name: str = "two cores") -> Table:
    """nano on two CPU cores over the shipped smoke space: eager 0.27 s an update, compiled a little better."""
    config = load("nano")
    space = fit_space(load_space("smoke"), config, "cpu", 2)

    def row(execution: Mapping[str, Any]) -> Row:
        eager = execution["update"] == "eager"
        log = math.log(7600.0) + (0.0 if eager else 0.3) + (0.0 if execution["cpu_threads"] == 2 else -0.5)
        log -= 0.15 * (execution["sdpa_backend"] == "math") + 0.02 * math.log2(8 / execution["micro_batch_size"])
        return Row(math.exp(log), (-0.03, 0.0, 0.03), cold=0.8 if eager else 16.0, warm=0.8 if eager else 2.0)

    return Table(name, space, row, float(config.token_budget), without=("x86",), start=1.0, rest=0.5)


def _table(name: str, space: FittedSpace, row: Callable[[Mapping[str, Any]], Row]) -> Table:
    # No machine's figures went in, but its ranges are those of an H200.
    return Table(name, space, row, float(load("20m-32k").token_budget), without=("h200",))
