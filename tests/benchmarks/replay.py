"""How well the study decides: replayed beside its rivals against recorded and made-up tables, under a simulated clock.

    python tests/benchmarks/replay.py --seeds 50 --out tests/benchmarks/results/replay.json
    python tests/benchmarks/replay.py --table h200_table.jsonl --seeds 50   # what record_table.py wrote

Figure of merit: seconds to have trained N targets, from the study's start: tuning, verification of the choice in three
interleaved pairs with the baseline (none for the baseline itself), then the planned trainings with the choice. N is the
recipe's budget once, 1 B targets once, and the recipe 240 times. The oracle knows every row, and measures and verifies
the one that makes the sum smallest. Rivals do not stop before their list is done, so each is given the best of four
budgets in hindsight (10, 25, 50 and 100%), median and worst each; "no search" measures the baseline and trains with it.
Regret: how much slower than the best row the choice is after 25, 50 and 100% of the budget (the study's with 240 runs
planned). A row inside the A/A band of the best counts as the best. Optuna's TPE takes part where `optuna` is installed.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from replay_factorial import KERNELS, factorial, flat, trap, two_cores
from replay_machine import Machine, Table
from replay_rivals import Rival, rivals
from replay_tables import gh200, h200, recorded

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate
from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.space import SearchWindows
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import InterleavedPairs

BUDGET_SECONDS = 2700.0
SHARES = (0.25, 0.5, 1.0)
HINDSIGHT = (0.1, *SHARES)
"""Of the budget, where a rival may have stopped."""


@dataclass(frozen=True)
class Scenario:
    """What is to be trained."""

    name: str
    tokens: float
    runs: int


@dataclass
class Path_:
    """A strategy's choice over time: (seconds spent, execution), and when it was done, verification included or not."""

    choices: list[tuple[float, dict[str, Any] | None]]
    ended: float
    verified: bool
    trials: int

    def at(self, seconds: float) -> dict[str, Any] | None:
        """The choice after so many seconds; None before there is one."""
        return next((choice for when, choice in reversed(self.choices) if when <= seconds), None)


def tables() -> list[Table]:
    """Recorded machines, and formulas."""
    made = [factorial(f"kernels {seed}", seed) for seed in (1, 2, 3)]
    small = [factorial(f"three kernels {seed}", seed, KERNELS[:3]) for seed in (4, 5)]
    return [gh200(), h200(), *made, *small, flat(), trap(), two_cores()]


def scenarios(table: Table) -> list[Scenario]:
    return [Scenario("recipe", table.tokens, 1), Scenario("1 B", 1e9, 1), Scenario("240 recipes", table.tokens, 240)]


def run_study(
    table: Table,
    seed: int,
    scenario: Scenario,
    budget: float,
    search: bool = True,
    search_windows: SearchWindows = "by_need",
) -> Path_:
    """The study, controls and verification included, or its baseline alone; on one device, which has no name."""
    machine = Machine(table, seed)
    objective = Objective("training", scenario.tokens, scenario.runs)
    priors = Priors(table.space.device_kind).without(*table.without)
    space = replace(table.space, search_windows=search_windows)
    study = Study(space, objective=objective, verifier=InterleavedPairs(), priors=priors)
    elapsed, trials, choices = 0.0, 0, []
    while isinstance(answer := study.ask(budget - elapsed, ""), Trial):
        record = machine.measure(
            answer.candidate.execution, answer.protocol, answer.candidate.id, bar=study.bar(answer)
        )
        purpose = "control" if answer.stage == "control" else "search"
        record = record.model_copy(update={"timestamp": elapsed, "purpose": purpose})
        elapsed, trials = elapsed + (record.seconds.total or 0.0), trials + 1
        study.tell(record)
        selection = study.selection()
        choices.append((elapsed, selection.record.execution if selection else None))
        if answer.stage == "baseline" and not search:
            break
    return Path_(choices, elapsed, True, trials)


def run_rival(rival: Rival, table: Table, seed: int, budget: float) -> Path_:
    """A rival until its list is done or the budget is over; what would end after it is not started."""
    machine = Machine(table, seed)
    elapsed, trials, best, choices, chosen = 0.0, 0, 0.0, [], None
    execution, windows = next(rival)
    while True:
        protocol = Protocol(**{**table.space.protocol.model_dump(), "windows": windows})
        record = machine.measure(execution, protocol)
        elapsed, trials = elapsed + (record.seconds.total or 0.0), trials + 1
        if elapsed > budget:
            break
        if record.fate == Fate.COMPLETE and (rate(record) or 0.0) > best:
            best, chosen = rate(record) or 0.0, execution
        choices.append((elapsed, chosen))
        try:
            execution, windows = rival.send(record)
        except StopIteration:
            break
    return Path_(choices, min(elapsed, budget), False, trials)


def oracle_seconds(table: Table, scenario: Scenario) -> float:
    """Seconds of one who knows the table: the best choice measured, verified and trained with, noise left out."""
    base, totals = table.space.baseline, []
    for execution in table.space.executions():
        if table[execution].fate != Fate.COMPLETE:
            continue
        total = table.measuring_seconds(execution, cold=True) + table.verifying_seconds(execution)
        if execution != base:  # which has to be compiled for the first pair
            total += table.measuring_seconds(base, cold=True) - table.measuring_seconds(base)
        totals.append(total + table.training_seconds(execution, scenario.tokens, scenario.runs))
    return min(totals)


def total_seconds(path: Path_, table: Table, scenario: Scenario, budget: float) -> float:
    """Seconds until everything is trained, had the strategy been given `budget`."""
    choice = path.at(budget)
    spent = min(path.ended, budget)
    if not path.verified and choice is not None:
        spent += table.verifying_seconds(choice)
    return spent + table.training_seconds(choice, scenario.tokens, scenario.runs)


def regret(choice: dict[str, Any] | None, table: Table, best: float, band: float) -> float:
    chosen = table[table.space.baseline if choice is None else choice].rate
    lost = 1 - chosen / best
    return 0.0 if lost <= band else lost


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "worst": round(max(values), 4)}


def judge(table: Table, seeds: range, budget: float, search_windows: SearchWindows = "by_need") -> dict[str, Any]:
    """Ratios to the oracle and regrets of everybody on one table."""
    best, band = table.best_row.rate, table.band
    cases = scenarios(table)
    floor = {case.name: oracle_seconds(table, case) for case in cases}
    ratios: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
    regrets: dict[str, Any] = {}
    trials: dict[str, float] = {}
    for case in cases:
        paths = [run_study(table, seed, case, budget, search_windows=search_windows) for seed in seeds]
        took = [total_seconds(path, table, case, budget) for path in paths]
        ratios[case.name]["study"] = summary([seconds / floor[case.name] for seconds in took])
        ratios[case.name]["no search"] = summary(
            [
                total_seconds(run_study(table, seed, case, budget, False), table, case, budget) / floor[case.name]
                for seed in seeds
            ]
        )
        trials[f"study, {case.name}"] = statistics.mean(path.trials for path in paths)
    regrets["study"] = regrets_of(paths, table, best, band, budget)
    for name, make in rivals().items():
        paths = [run_rival(make(table, seed), table, seed, budget) for seed in seeds]
        for case in cases:
            options = [
                summary([total_seconds(path, table, case, share * budget) / floor[case.name] for path in paths])
                for share in HINDSIGHT
            ]
            # Each of the two at the budget that flatters it.
            ratios[case.name][name] = {key: min(option[key] for option in options) for key in ("median", "worst")}
        regrets[name] = regrets_of(paths, table, best, band, budget)
        trials[name] = statistics.mean(path.trials for path in paths)
    return {
        "table": table.name,
        "aa_band": round(band, 4),
        "oracle_seconds": floor,
        "ratios": ratios,
        "regret": regrets,
        "trials": trials,
    }


def regrets_of(
    paths: list[Path_], table: Table, best: float, band: float, budget: float
) -> dict[str, dict[str, float]]:
    return {
        f"{share:.0%}": summary([regret(path.at(share * budget), table, best, band) for path in paths])
        for share in SHARES
    }


def lines(results: list[dict[str, Any]]) -> Iterator[str]:
    """A table in Markdown: ratio to the oracle, median and worst."""
    names = list(results[0]["ratios"]["recipe"])
    yield "| table | to train | oracle, s | " + " | ".join(names) + " |"
    yield "|---|---|---:|" + "---:|" * len(names)
    for result in results:
        for case, ratios in result["ratios"].items():
            cells = [f"{ratios[name]['median']:.2f}, {ratios[name]['worst']:.2f}" for name in names]
            yield f"| {result['table']} | {case} | {result['oracle_seconds'][case]:,.0f} | " + " | ".join(cells) + " |"
    names.remove("no search")
    yield ""
    yield "| table | " + " | ".join(f"{name}, regret %" for name in names) + " |"
    yield "|---|" + "---:|" * len(names)
    for result in results:
        cells = [
            " / ".join(f"{100 * result['regret'][name][share]['median']:.1f}" for share in ("25%", "50%", "100%"))
            for name in names
        ]
        yield f"| {result['table']} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--table", type=Path, help="recorded by record_table.py; instead of the tables kept here")
    parser.add_argument("--preset", default="20m-32k", help="the recipe of --table")
    parser.add_argument("--only", nargs="*", help="names of tables")
    parser.add_argument("--search-windows", choices=get_args(SearchWindows), default="by_need")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = [recorded(options.table, options.preset)] if options.table else tables()
    results = []
    for table in chosen:
        if options.only and table.name not in options.only:
            continue
        began = time.perf_counter()
        results.append(judge(table, range(options.seeds), options.budget_seconds, options.search_windows))
        print(f"{table.name}: {time.perf_counter() - began:.0f} s", flush=True)
        if options.out:
            kept = {
                "command": shlex.join(["python", "tests/benchmarks/replay.py", *sys.argv[1:]]),
                "budget_seconds": options.budget_seconds,
                "tables": results,
            }
            options.out.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
