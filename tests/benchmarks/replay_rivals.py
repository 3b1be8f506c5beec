"""The study's rivals in the replay: what else could choose the next measurement.

Each is a generator of (execution, windows) that is sent the record of each; its choice is the fastest complete record
it has seen. None of them stops by itself before its list or its budget is over.
"""

import random
from collections.abc import Callable, Generator, Mapping
from typing import Any

from replay_machine import Table
from staged_order import staged_plan

from tinyllm_ray.config import identity
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.rates import rate

Rival = Generator[tuple[dict[str, Any], int], TrialRecord, None]
"""Executions and numbers of windows out, records in."""


def full_grid(table: Table, seed: int) -> Rival:
    """Every execution in the space's order, the baseline first."""
    for execution in table.space.executions():
        yield execution, table.space.protocol.windows


def shuffled(table: Table, seed: int) -> Rival:
    """The baseline, then every execution in a random order."""
    first, *rest = table.space.executions()
    random.Random(f"random {seed}").shuffle(rest)
    for execution in (first, *rest):
        yield execution, table.space.protocol.windows


def staged(table: Table, seed: int) -> Rival:
    """The reference system's order."""
    results: dict[str, TrialRecord] = {}
    while True:
        steps = (step for stage in staged_plan(table.space, results) for step in stage.steps)
        step = next((step for step in steps if not step.skip and step.identity not in results), None)
        if step is None:
            return
        results[step.identity] = yield step.execution, table.space.protocol.windows


def successive_halving(table: Table, seed: int, factor: int = 3) -> Rival:
    """ASHA (Li et al., 2020) with one worker: rungs of 1, 3 and 9 windows, the best third of a rung is promoted.

    A promoted candidate is a fresh process that finds its compilation cached.
    """
    first, *rest = table.space.executions()
    random.Random(f"asha {seed}").shuffle(rest)
    fresh = iter((first, *rest))
    rungs: list[dict[str, tuple[float, dict[str, Any]]]] = [{}, {}, {}]
    while True:
        chosen = None
        for level in (1, 0):
            order = sorted(rungs[level].items(), key=lambda item: -item[1][0])[: len(rungs[level]) // factor]
            waiting = [item for item in order if item[0] not in rungs[level + 1]]
            if waiting:
                chosen = level + 1, waiting[0][1][1]
                break
        level, execution = chosen or (0, next(fresh, None))
        if execution is None:
            return
        record = yield execution, factor**level
        rungs[level][identity(execution)] = rate(record) or 0.0, execution


def tpe(table: Table, seed: int) -> Rival:
    """Optuna's TPE (Bergstra et al., 2011) with its defaults, the baseline enqueued; repeats cost nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = table.space
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial({key: values.index(space.baseline[key]) for key, values in _choices(table).items()})
    seen: dict[str, float] = {}
    for _ in range(400):
        trial = study.ask()
        chosen = {
            key: values[trial.suggest_categorical(key, list(range(len(values))))]
            for key, values in _choices(table).items()
        }
        execution = space.settle(chosen)
        name = identity(execution)
        if name not in seen:
            record = yield execution, space.protocol.windows
            seen[name] = (rate(record) or 0.0) if record.fate == Fate.COMPLETE else 0.0
        study.tell(trial, seen[name])


def _choices(table: Table) -> Mapping[str, list[Any]]:
    space = table.space
    return {
        key: list(dict.fromkeys([*values, *([space.baseline[key]] if space.baseline[key] is not None else [])]))
        for key, values in space.factors.items()
    }


def rivals() -> dict[str, Callable[[Table, int], Rival]]:
    """By name; TPE only where Optuna is installed."""
    found: dict[str, Callable[[Table, int], Rival]] = {
        "full grid": full_grid,
        "staged order": staged,
        "random": shuffled,
        "ASHA": successive_halving,
    }
    try:
        import optuna  # noqa: F401
    except ImportError:
        return found
    return {**found, "Optuna TPE": tpe}
