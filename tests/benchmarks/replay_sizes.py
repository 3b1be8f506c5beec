"""What carrying over from one size to the next is worth: studies of 20m, 50m and 90m replayed with and without it.

    python tests/benchmarks/replay_sizes.py --families 6 --seeds 5 --out tests/benchmarks/results/replay_sizes.json

A family of tables has one machine's effects, drawn once, for three sizes. `alike`: what a setting does differs from
size to size by a percent or two; `apart`: also, the kernel that gained most at the first two sizes loses 8% at the
third, and graphs of whole updates lose 6% there; `unlike`: every size has effects of its own, so that nothing carries
over. 240 trainings are planned with each size. Reported by size, without and with carrying over: trials of the search,
seconds of the study, verification included, how much slower than the best row its choice is, and the seconds of study
and trainings over those of trainings with the best row; for an ample budget and a short one.
"""

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay import regret
from replay_factorial import COLD, KERNELS, WARM, kernel_space
from replay_machine import Machine, Row, Table

from tinyllm_ray.config import load
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.earlier import EarlierStudy
from tinyllm_ray.search.kinds import kind_of
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import InterleavedPairs

SIZES = ("20m-32k", "50m", "90m")
FAMILIES = ("alike", "apart", "unlike")
BUDGETS = {"ample": 2700.0, "short": 400.0}
RUNS = 240
WOBBLE = 0.012
"""By which what a setting does differs from size to size."""


def family(kind: str, seed: int, kernels: tuple[str, ...] = KERNELS) -> list[Table]:
    """A table a size."""
    dice = random.Random(f"family {seed}")
    drawn = _Effects(dice, kernels)
    best = max(kernels, key=lambda kernel: drawn.gains[kernel])
    tables = []
    for place, size in enumerate(SIZES):
        own = _Effects(dice, kernels) if kind == "unlike" else drawn.wobbled(dice)
        if kind == "apart" and place == 2:
            own.gains[best] = -0.08
            own.kinds["graph"] -= 0.06
        tables.append(_table(f"{kind} {seed} {size}", size, own))
    return tables


class _Effects:
    """What settings do to the logarithm of throughput."""

    def __init__(self, dice: random.Random, kernels: Sequence[str]) -> None:
        self.base = math.log(dice.uniform(1.2e6, 2.0e6))
        self.kinds = {
            "eager": dice.gauss(-0.8, 0.1),
            "default": 0.0,
            "reduce-overhead": dice.gauss(0.0, 0.04),
            "graph": dice.gauss(0.03, 0.04),
        }
        self.half = {"eager": dice.uniform(12, 24), "default": dice.uniform(10, 24)}
        self.graph_half = dice.uniform(3, 9)
        self.backends = {"auto": 0.0, "flash": dice.gauss(-0.04, 0.05), "efficient": dice.gauss(-0.15, 0.08)}
        self.gains = {kernel: dice.gauss(0.03, 0.05) for kernel in kernels}
        self.pairs = {pair: dice.gauss(0.0, 0.015) for pair in itertools.combinations(kernels, 2)}

    def wobbled(self, dice: random.Random) -> "_Effects":
        other = object.__new__(_Effects)
        other.__dict__ = dict(self.__dict__)
        for name in ("kinds", "backends", "gains"):
            values = getattr(self, name).items()
            setattr(other, name, {key: value + dice.gauss(0, WOBBLE) if value else 0.0 for key, value in values})
        return other


def _table(name: str, size: str, effects: _Effects) -> Table:
    config = load(size)
    space = kernel_space(tuple(effects.gains), preset=size)
    larger = space.parameters / load(SIZES[0]).model.parameters

    def row(execution: Mapping[str, Any]) -> Row:
        kind, rows = kind_of(execution), execution["micro_batch_size"]
        on = [kernel for kernel in effects.gains if execution[kernel] == "triton"]
        log = effects.base - math.log(larger) + 0.1 * math.log(larger)  # larger matrices run a little better
        log += effects.kinds[kind] + effects.backends[execution["sdpa_backend"]]
        half = effects.half.get(kind, effects.graph_half) * larger**-0.75
        log -= math.log1p((half / rows) ** 3) / 3 - 0.03 * math.log2(rows)
        log += sum(effects.gains[kernel] for kernel in on)
        log += sum(effects.pairs[pair] for pair in itertools.combinations(on, 2))
        memory = 8e9 * larger**0.75 * rows / 32 * (3 if kind == "eager" else 1)
        cold = COLD[kind] * larger**0.3
        return Row(math.exp(log), cold=cold, warm=WARM[kind], memory=memory)

    return Table(name, space, row, float(config.token_budget), without=("h200",))


def study(
    table: Table, seed: int, budget: float, earlier: Sequence[EarlierStudy]
) -> tuple[list[TrialRecord], float, dict[str, Any] | None]:
    """A replayed study: its records, its seconds and its choice."""
    machine = Machine(table, seed)
    priors = Priors(table.space.device_kind, earlier=tuple(earlier)).without(*table.without)
    objective = Objective("training", table.tokens, RUNS)
    asked = Study(table.space, objective=objective, verifier=InterleavedPairs(), priors=priors)
    elapsed, records = 0.0, []
    while isinstance(answer := asked.ask(budget - elapsed), Trial):
        record = machine.measure(answer.candidate.execution, candidate=answer.candidate.id)
        if answer.stage == "verification":
            record = record.model_copy(update={"purpose": "verification"})
        elapsed += record.seconds.total or 0.0
        records.append(record)
        asked.tell(record)
    chosen = asked.selection()
    return records, elapsed, chosen.record.execution if chosen else None


def sizes_in_turn(tables: Sequence[Table], seed: int, budget: float, carry: bool) -> list[dict[str, float]]:
    """A study of each table, the next one beginning with what the earlier ones learned where it may."""
    earlier: list[EarlierStudy] = []
    found = []
    for table in tables:
        records, seconds, choice = study(table, seed, budget, earlier if carry else ())
        lost = regret(choice, table, table.best_row.rate, table.band)
        searched = sum(record.purpose == "search" for record in records)
        trained = table.training_seconds(choice, table.tokens, RUNS)
        least = table.training_seconds(_best(table), table.tokens, RUNS)
        found.append({"searched": searched, "seconds": seconds, "regret": lost, "total": (seconds + trained) / least})
        space = table.space
        earlier.append(EarlierStudy.of(space.parameters, space.targets_per_update, records))
    return found


def _best(table: Table) -> dict[str, Any]:
    rows = [one for one in table.space.executions() if table[one].fate == Fate.COMPLETE]
    return max(rows, key=lambda one: table[one].rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=FAMILIES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    print("| family | budget | size | trials of the search | seconds | regret %, mean, worst | seconds in all, ratio |")
    print("|---|---|---|---:|---:|---:|---:|", flush=True)
    for kind in options.kinds:
        made = [family(kind, number) for number in range(options.families)]
        for name, budget in BUDGETS.items():
            ways = [
                [sizes_in_turn(tables, seed, budget, carry) for tables in made for seed in range(options.seeds)]
                for carry in (False, True)
            ]
            for place, size in enumerate(SIZES):
                both = [_summary([one[place] for one in way]) for way in ways]
                results.append({"family": kind, "budget": name, "size": size, "alone": both[0], "carried": both[1]})
                cells = [
                    " -> ".join(form.format(**one) for one in both)
                    for form in ("{searched:.1f}", "{seconds:.0f}", "{regret:.2f} {worst:.1f}", "{total:.4f}")
                ]
                print(f"| {kind} | {name} | {size} | {' | '.join(cells)} |", flush=True)
    if options.out:
        command = f"python tests/benchmarks/replay_sizes.py --families {options.families} --seeds {options.seeds}"
        options.out.write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")


def _summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    means = {key: statistics.mean(one[key] for one in found) for key in ("searched", "seconds", "total")}
    lost = [100 * one["regret"] for one in found]
    rounded = {key: round(value, 4) for key, value in means.items()}
    return {**rounded, "regret": round(statistics.mean(lost), 3), "worst": round(max(lost), 2)}


if __name__ == "__main__":
    main()
