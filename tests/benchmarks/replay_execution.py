"""How near a seven-minute study comes to the best of the shipped execution space, whether or not its priors hold.

    python tests/benchmarks/replay_execution.py --seeds 50 --out tests/benchmarks/results/replay_execution.json

A table by formula over all 18,432 executions that `execution` has for 20m at 32,768 targets an update: kinds, sizes,
attention, Triton kernels and the residual's dtype with main effects, interactions and failures, each drawn anew for
every seed around what an update's kernels promise on an H200, or around something else (`STORIES`). The whole study is
played, verification in pairs of processes included, under a simulated clock: 420 s, of which 26 are Ray's start, the
last report and its reserve. Regret: how much slower than the best row the selected one is; beside the best of all also
the best of those that compile within a minute, as max-autotune's 1% takes a third of the budget. Noise: 0.4% between
processes, 0.5% between windows; a first update takes 20 to 33 s cold, five times that under max-autotune, 4 s warm.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from replay_machine import Machine, Row, Table

from tinyllm_ray.config import load
from tinyllm_ray.records import Fate, Proof
from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.kinds import kind_of
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.paired import RESERVED_SHARE, PairedVerifier
from tinyllm_ray.search.priors import Priors, launch_bound
from tinyllm_ray.search.space import SearchWindows, load_space
from tinyllm_ray.search.study import Study

BUDGET_SECONDS = 420.0
BESIDE_SECONDS = 26.0
"""Of the budget, for Ray's start, the last report and its reserve."""
NOT_INSTALLED = ("flash_attn_interface", "flash_attn.cute.interface")
RUNS = 100
"""Planned trainings, as `tune` counts them unless told."""
CLOSE = 0.02

KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel", "activation_kernel", "optimizer_kernel")
SETTINGS = (*KERNELS, "residual_dtype")
PROMISED = {
    "loss_kernel": 0.102,
    "optimizer_kernel": 0.060,
    "norm_kernel": 0.022,
    "rotary_kernel": 0.015,
    "activation_kernel": 0.015,
    "residual_dtype": 0.059,
}
"""Share of a plain update's seconds that each saves, by the bytes it does not move: 1.93 M targets/s to 2.65 M."""


@dataclass(frozen=True)
class Story:
    """What is true of a made-up machine."""

    saved: Mapping[str, float] = field(default_factory=lambda: PROMISED)
    """Share of an update's seconds, by setting."""
    spread: float = 0.005
    """Its standard deviation from table to table, beside a quarter of its size."""
    failing: frozenset[tuple[str, Any]] = frozenset()
    """Settings with which nothing runs."""
    auto: str = "cudnn"
    """What PyTorch chooses; it was cuDNN's attention that ran for 20m on an H200."""
    backends: Mapping[str, float] = field(default_factory=lambda: {"cudnn": 0.0, "flash": -0.05, "efficient": -0.2})
    cold: float = 24.0
    """Seconds of a first update, 0.8 more for each kernel."""
    half_rows: Mapping[str, float] = field(
        default_factory=lambda: {"eager": 18.0, "compiled": 20.0, "reduce-overhead": 7.0, "graph": 6.0}
    )


NOTHING = dict.fromkeys(SETTINGS, 0.0)
STORIES: dict[str, Story] = {
    "as promised": Story(),
    "half of it": Story({key: value / 2 for key, value in PROMISED.items()}),
    "kernels gain nothing": Story(NOTHING, spread=0.005),
    "kernels cost 10%": Story(dict.fromkeys(KERNELS, -0.02) | {"residual_dtype": 0.0}, spread=0.005),
    "each kernel costs 10%": Story(dict.fromkeys(SETTINGS, -0.1), spread=0.01),
    "some gain and some cost": Story(PROMISED | {"loss_kernel": -0.08, "norm_kernel": -0.05, "residual_dtype": -0.03}),
    "any effect": Story(NOTHING, spread=0.06),
    "no graph can be captured": Story(failing=frozenset({("update", "graph")})),
    "bfloat16 residuals fail": Story(failing=frozenset({("residual_dtype", "bfloat16")})),
    "the loss kernel fails": Story(failing=frozenset({("loss_kernel", "triton")})),
    "two kernels fail": Story(failing=frozenset({("norm_kernel", "triton"), ("optimizer_kernel", "triton")})),
    "flash is best": Story(backends={"cudnn": 0.0, "flash": 0.06, "efficient": -0.1}),
    "auto is flash": Story(auto="flash", backends={"cudnn": 0.04, "flash": 0.0, "efficient": -0.2}),
    "compilation takes a minute": Story(cold=55.0),
    "small micro-batches": Story(half_rows=dict.fromkeys(("eager", "compiled", "reduce-overhead", "graph"), 1.0)),
}


def execution_table(name: str, story: Story, seed: int, without: tuple[str, ...] = ("h200",)) -> Table:
    """A machine of this story."""
    dice = random.Random(f"{name} {seed}")
    plain = math.log(dice.uniform(1.7e6, 2.0e6))
    saved = {key: dice.gauss(story.saved[key], story.spread + abs(story.saved[key]) / 4) for key in SETTINGS}
    backends = {backend: dice.gauss(effect, 0.01) for backend, effect in story.backends.items()}
    kinds = {
        "eager": dice.gauss(-0.84, 0.05),
        "default": 0.0,
        "reduce-overhead": dice.gauss(-0.005, 0.01),
        "max-autotune": dice.gauss(0.008, 0.006),
        "graph": dice.gauss(0.005, 0.01),
        "graph max-autotune-no-cudagraphs": dice.gauss(0.012, 0.006),
    }
    larger = dice.uniform(0.0, 0.05) if story.half_rows["graph"] > 2 else -0.02
    half = {way: rows * math.exp(dice.gauss(0, 0.1)) for way, rows in story.half_rows.items()}
    pairs = {pair: dice.gauss(0.0, 0.003) for pair in itertools.combinations(SETTINGS, 2)}
    with_way = {(key, way): dice.gauss(0.0, 0.003) for key in SETTINGS for way in story.half_rows}
    with_backend = {(key, backend): dice.gauss(0.0, 0.002) for key in SETTINGS for backend in backends}

    def row(execution: Mapping[str, Any]) -> Row:
        kind, size, backend = kind_of(execution), execution["micro_batch_size"], execution["sdpa_backend"]
        backend = story.auto if backend == "auto" else backend
        on = [key for key in SETTINGS if execution[key] in ("triton", "bfloat16")]
        way = "reduce-overhead" if kind in ("reduce-overhead", "max-autotune") else execution["update"]
        share = 1 - sum(saved[key] + with_way[key, way] + with_backend[key, backend] for key in on)
        share -= sum(pairs[pair] for pair in itertools.combinations(on, 2))
        log = plain + kinds[kind] + backends[backend] - math.log(share) + larger * math.log2(size / 32)
        log += launch_bound(size, half[way]) - launch_bound(32, half[way])
        fails = any(item in story.failing for item in execution.items())
        seconds = 0.8 if kind == "eager" else (story.cold + 0.8 * len(on)) * (5 if "max-autotune" in kind else 1)
        memory = 8e9 * size / 32 * (2.5 if kind == "eager" else 1) * (0.6 if "loss_kernel" in on else 1)
        fate = Fate.FAILED if fails else Fate.COMPLETE
        noise = (-0.005, -0.0025, 0.0, 0.0025, 0.005)
        return Row(math.exp(log), noise, seconds, 0.8 if kind == "eager" else 4.0, fate, memory)

    config = load("20m-32k")
    space = fit_space(load_space("execution"), config, "cuda", 16, lacks=NOT_INSTALLED)
    return Table(f"{name} {seed}", space, row, float(config.token_budget), without=without, start=0.7, rest=1.0)


def best_rates(table: Table) -> tuple[float, float]:
    """Of all executions, and of those that compile in a minute; thread counts do nothing here."""
    space = table.space
    factors = {key: values for key, values in space.factors.items() if key != "cpu_threads"}
    rows = [table.row(execution) for execution in replace(space, factors=factors).executions()]
    rates = [(row.rate, row.cold <= 66) for row in rows if row.fate == Fate.COMPLETE]
    return max(rates)[0], max(rate for rate, quick in rates if quick)


@dataclass
class Played:
    """What became of a study."""

    selected: dict[str, Any] | None
    searched: int
    """Trials of the search, the baseline and the eager row among them."""
    dominated: int
    elapsed: float
    verified: bool
    decision_milliseconds: list[float]
    steps: list[str]


def play(
    table: Table,
    story: Story,
    seed: int,
    budget: float = BUDGET_SECONDS,
    runs: int = RUNS,
    search_windows: SearchWindows = "by_need",
) -> Played:
    """The study that `tune --budget` runs, from its first question to its verdict."""
    machine, space = Machine(table, seed), replace(table.space, search_windows=search_windows)
    objective = Objective("training", table.tokens, runs)
    verifier = PairedVerifier(space.protocol, RESERVED_SHARE * budget, objective)
    study = Study(space, objective=objective, verifier=verifier, priors=Priors("cuda").without(*table.without))
    left = budget - BESIDE_SECONDS
    played = Played(None, 0, 0, 0.0, False, [], [])
    while True:
        began = time.process_time()
        answer = study.ask(left - played.elapsed, "")
        played.decision_milliseconds.append(1000 * (time.process_time() - began))
        if not isinstance(answer, Trial):
            break
        record = machine.measure(
            answer.candidate.execution, answer.protocol, answer.candidate.id, bar=study.bar(answer)
        )
        purpose = answer.stage if answer.stage in ("control", "verification") else "search"
        changes: dict[str, Any] = {"timestamp": played.elapsed, "purpose": purpose, "round": answer.round}
        asked = answer.candidate.execution["sdpa_backend"]
        seen = story.auto if asked == "auto" else asked
        changes |= {
            "proof": Proof(kernel_source="device", attention_asked=asked, attention_seen=[seen]),
        }
        played.elapsed += record.seconds.total or 0.0
        played.searched += purpose == "search"
        played.dominated += record.fate == Fate.DOMINATED
        played.steps.append(
            f"{purpose} {answer.candidate.label} {record.targets_per_second or 0:,.0f} {played.elapsed:.0f} s"
        )
        study.tell(record.model_copy(update=changes))
    selection = study.selection()
    played.selected = selection.record.execution if selection else None
    played.verified = study.verified() is not None
    played.steps.append(answer.reason)
    return played


def judge(
    name: str,
    story: Story,
    seeds: range,
    without: tuple[str, ...],
    budget: float,
    search_windows: SearchWindows = "by_need",
) -> dict[str, Any]:
    """Regrets of all studies of one story."""
    regrets, quick, searched, dominated, verified, slow = [], [], [], [], [], []
    for seed in seeds:
        table = execution_table(name, story, seed, without)
        played = play(table, story, seed, budget, search_windows=search_windows)
        chosen = table.space.baseline if played.selected is None else played.selected
        best, best_quick = best_rates(table)
        regrets.append(1 - table[chosen].rate / best)
        quick.append(1 - table[chosen].rate / best_quick)
        searched.append(played.searched)
        dominated.append(played.dominated)
        verified.append(played.verified)
        slow += played.decision_milliseconds
    return {
        "story": name,
        "within_2_percent": round(statistics.mean(lost <= CLOSE for lost in regrets), 3),
        "within_2_percent_of_quick": round(statistics.mean(lost <= CLOSE for lost in quick), 3),
        "regret": {"median": round(statistics.median(regrets), 4), "worst": round(max(regrets), 4)},
        "regret_mean": round(statistics.mean(regrets), 4),
        "searched": round(statistics.mean(searched), 1),
        "dominated": round(statistics.mean(dominated), 1),
        "verified": round(statistics.mean(verified), 2),
        "decision_milliseconds": {"median": round(statistics.median(slow), 1), "worst": round(max(slow), 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--only", nargs="*", help="names of stories")
    parser.add_argument("--without", nargs="*", default=["h200"], help="machines whose priors are left out")
    parser.add_argument("--search-windows", choices=get_args(SearchWindows), default="by_need")
    parser.add_argument("--show", action="store_true", help="every step of the first seed's study")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name, story in STORIES.items():
        if options.only and name not in options.only:
            continue
        if options.show:
            table = execution_table(name, story, 0)
            print("\n".join(play(table, story, 0, search_windows=options.search_windows).steps))
            continue
        without, budget = tuple(options.without), options.budget_seconds
        results.append(judge(name, story, range(options.seeds), without, budget, options.search_windows))
        print(json.dumps(results[-1]), flush=True)
        if options.out:
            command = f"python tests/benchmarks/replay_execution.py --seeds {options.seeds}"
            command += f" --without {' '.join(options.without)}".rstrip()
            kept = {"command": command, "budget_seconds": options.budget_seconds, "stories": results}
            options.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
