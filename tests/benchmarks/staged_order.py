"""The reference system's staged order, a rival in the replay: which executions to try next, given the results so far.

Baseline, the eager row beside it, kinds of update over micro-batch sizes, SDPA backends for the best two sizes, then
compile modes, CPU threads and every other factor for the best. The whole plan is computed from the results each time,
so that a resumed study and one that never stopped are the same.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.execution import HOST_KEYS
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.rates import ranked, rate

SLOWER_SIZES_END = 0.10
"""A size this much slower than the next larger one ends its kind: throughput over sizes has one peak."""

BEST_SIZES = 2
"""Sizes that SDPA backends are tried at; which is the better of two may depend on the backend."""


FIXED_STAGES = 3
"""The first stages (baseline, eager row, sizes) name the same executions whatever the results; later ones depend on
everything before them."""


@dataclass(frozen=True)
class Step:
    """One execution the plan names."""

    execution: dict[str, Any]
    identity: str
    skip: str | None = None
    """Why it need not be measured; None where it is to be."""


@dataclass(frozen=True)
class Stage:
    """Executions that may be measured in any order, or at once."""

    name: str
    steps: tuple[Step, ...]


def staged_plan(
    space: FittedSpace, results: Mapping[str, TrialRecord], running: Collection[str] = ()
) -> Iterator[Stage]:
    """The stages in order, each execution in one only; `results` and `running` are by execution identity.

    A stage is meaningful once those before it are settled, so callers stop at the first that is not.
    """
    planned: dict[str, None] = {}  # in the order planned, which settles equal throughputs

    def stage(name: str, steps: Iterable[Step]) -> Stage:
        fresh: dict[str, Step] = {}
        for step in steps:
            if step.identity not in planned:
                fresh.setdefault(step.identity, step)
        planned.update(dict.fromkeys(fresh))
        return Stage(name, tuple(fresh.values()))

    def best() -> list[TrialRecord]:
        return ranked(results[name] for name in planned if name in results)

    baseline = space.baseline
    yield stage("baseline", [_step(baseline, results)])
    yield stage("eager", [_step(space.settle({**baseline, "update": "eager"}), results)])
    yield stage("micro_batch_size", _ladders(space, results, running))
    bases = _best_sizes(best())
    yield stage("sdpa_backend", _variations(space, "sdpa_backend", bases, results))
    staged = ("micro_batch_size", "update", "sdpa_backend", "compile_mode", "cpu_threads")
    for key in ("compile_mode", "cpu_threads", *(key for key in space.factors if key not in staged)):
        bases = [record.execution for record in best()[:1]]
        yield stage(key, _variations(space, key, bases, results))


def _step(execution: dict[str, Any], results: Mapping[str, TrialRecord]) -> Step:
    return Step(execution, identity(execution), _too_large(execution, results))


def _ladders(space: FittedSpace, results: Mapping[str, TrialRecord], running: Collection[str]) -> Iterator[Step]:
    """Every kind of update over the micro-batch sizes from the largest down, eager last."""
    baseline = space.baseline
    kinds = space.factors.get("update", (baseline["update"],))
    sizes = sorted({baseline["micro_batch_size"], *space.factors.get("micro_batch_size", ())}, reverse=True)
    for kind in sorted(kinds, key=lambda kind: kind == "eager"):
        steps = [_step(space.settle({**baseline, "update": kind, "micro_batch_size": size}), results) for size in sizes]
        yield from _prune(steps, results, running)


def _prune(steps: list[Step], results: Mapping[str, TrialRecord], running: Collection[str]) -> Iterator[Step]:
    """One ladder, largest first, with a reason to skip on all steps below a size that was clearly slower."""
    larger: tuple[int, float] | None = None
    reason: str | None = None
    for step in steps:
        yield Step(step.execution, step.identity, step.skip or reason)
        size = step.execution["micro_batch_size"]
        if step.identity in running:
            larger = None  # not known yet, so the next smaller one has nothing to be compared with
            continue
        speed = _speed(results.get(step.identity))
        if speed is None:
            continue
        if larger and reason is None and speed < (1 - SLOWER_SIZES_END) * larger[1]:
            slower = 1 - speed / larger[1]
            kind = step.execution["update"]
            reason = f"skipped: {kind}, micro-batch {size} was {slower:.0%} slower than {larger[0]}"
        larger = (size, speed)


def _too_large(execution: Mapping[str, Any], results: Mapping[str, TrialRecord]) -> str | None:
    """Why the execution cannot fit in memory, judged by smaller micro-batches that did not."""
    size = execution["micro_batch_size"]
    others = {key: value for key, value in execution.items() if key != "micro_batch_size" and key not in HOST_KEYS}
    for record in results.values():
        smaller = record.execution["micro_batch_size"]
        if record.fate == Fate.OUT_OF_MEMORY and smaller < size and others.items() <= record.execution.items():
            return f"skipped: {execution['update']}, micro-batch {smaller} ran out of memory already"
    return None


def _variations(
    space: FittedSpace, key: str, bases: list[dict[str, Any]], results: Mapping[str, TrialRecord]
) -> Iterator[Step]:
    """Each base with each value of one factor, where that factor counts."""
    for base in bases:
        if space.counts(key, base):
            for value in space.factors.get(key, ()):
                yield _step(space.settle({**base, key: value}), results)


def _best_sizes(order: list[TrialRecord]) -> list[dict[str, Any]]:
    """The fastest execution of each of the best sizes, best first."""
    by_size: dict[int, dict[str, Any]] = {}
    for record in order:
        by_size.setdefault(record.execution["micro_batch_size"], record.execution)
    return list(by_size.values())[:BEST_SIZES]


def _speed(record: TrialRecord | None) -> float | None:
    """Targets a second of a result that says how fast its execution is."""
    return rate(record) if record is not None and record.fate in {Fate.COMPLETE, Fate.DOMINATED} else None
