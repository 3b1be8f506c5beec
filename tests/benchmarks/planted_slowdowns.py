"""How often real pairs of processes find a slowdown that was planted in one of them, on the machine at hand.

    python tests/benchmarks/planted_slowdowns.py --out tests/benchmarks/results/planted_two_cores.json

A round runs one execution in four processes through the real launcher, forwards or backwards by the Thue-Morse
sequence: the baseline, its equal, and two of which every update takes 1% and 2% longer, as it waits that share of its
own time. A study is a run of rounds as they came: some repeats of the baseline that tell how much processes differ,
then pairs until the product's verdict (`search.pairs`) is reached, eight at most. Studies begin at every round, so
they overlap; as many as `disjoint` says share nothing.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import torch

from tinyllm_ray.config import Config, load
from tinyllm_ray.measure.bounds import window_error
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.noise import learned_spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, LEAST_PAIRS, MOST_PAIRS, Pair, Side, Verdict, judge
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher

PLANTED = {"baseline": 0.0, "equal": 0.0, "slower_by_1%": 0.01, "slower_by_2%": 0.02}
"""Share of an update's seconds that it takes longer."""
REPEATS = (0, 3, 7)
"""Of the baseline before a study's pairs."""

_HOOK = """
import os, time

def plant():
    from tinyllm_ray.train.trainer import Trainer

    step, share = Trainer.step, float(os.environ["PLANTED_SHARE"])

    def slower(self):
        begin = time.perf_counter()
        found = step(self)
        now = time.perf_counter()
        end = now + share * (now - begin)
        while time.perf_counter() < end:
            pass
        return found

    Trainer.step = slower

os.register_at_fork(after_in_child=plant)
"""
"""Python runs it as `sitecustomize` in a launcher's starter, of which every candidate is a fork. The wait is a busy
one, as sleeping would be longer than asked by a part that counts."""


class Machine:
    """A launcher for each of the planted slowdowns."""

    def __init__(self, config: Config, updates: int, stack: ExitStack) -> None:
        self._config = config
        self._updates = updates
        folder = Path(tempfile.mkdtemp())
        (folder / "sitecustomize.py").write_text(_HOOK)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self._launchers: dict[str, Launcher] = {}
        for name, share in PLANTED.items():
            launcher = Launcher(folder / name, compile_cache_folder(), dict, {"sha256": "benchmark", "dirty": None})
            more = {"PYTHONPATH": path, "PLANTED_SHARE": str(share)} if share else {}
            with patch.dict(os.environ, more):
                launcher.warm_up()
            self._launchers[name] = stack.enter_context(launcher)

    def side(self, name: str) -> Side:
        """One process, from its start to its end."""
        record = self._launchers[name].run(self._request(name))
        assert record.fate == Fate.COMPLETE, record.reason
        assert record.targets_per_second is not None
        return Side(record.targets_per_second, _window_error(record))

    def _request(self, name: str) -> dict[str, object]:
        return {
            "study": "planted_slowdowns",
            "candidate": name,
            "label": name,
            "config": self._config.model_dump(mode="json"),
            "protocol": {"data_mode": "synthetic", "warmup_updates": 20, "updates_per_window": self._updates},
            "cache": None,
            "cache_identity": None,
            "configuration": None,
            "limit_seconds": 300.0,
        }


def _window_error(record: TrialRecord) -> float:
    return window_error([window.targets_per_second for window in record.windows])


def studies(rounds: list[dict[str, Side]], name: str, repeats: int) -> list[Verdict]:
    """The verdicts on `name` of studies that begin at every round that leaves enough of them."""
    found = []
    for begin in range(repeats, len(rounds) - MOST_PAIRS + 1):
        controls = [one["baseline"].targets_per_second for one in rounds[begin - repeats : begin]]
        spread = learned_spread([controls], CAUTIOUS_SPREAD)
        pairs = [Pair(one[name], one["baseline"]) for one in rounds[begin : begin + MOST_PAIRS]]
        looks = (judge(pairs[:count], spread) for count in range(LEAST_PAIRS, MOST_PAIRS + 1))
        found.append(next(verdict for verdict in looks if verdict.decided or verdict.pairs == MOST_PAIRS))
    return found


def figures(rounds: list[dict[str, Side]], repeats: int) -> dict[str, float]:
    """Shares of studies that are right, by what was planted."""
    row: dict[str, float] = {"control_repeats": repeats, "disjoint": len(rounds) // (repeats + MOST_PAIRS)}
    for name, share in PLANTED.items():
        if name == "baseline":
            continue
        verdicts = studies(rounds, name, repeats)
        right = [verdict.outcome == "slower" if share else verdict.differs for verdict in verdicts]
        covered = [verdict.low <= 1 / (1 + share) <= verdict.high for verdict in verdicts]
        row |= {
            "studies": len(verdicts),
            f"{name}_called_{'slower' if share else 'different'}": fmean(right),
            f"{name}_covered": fmean(covered),
            f"{name}_pairs": fmean(verdict.pairs for verdict in verdicts),
        }
    return row


def noise(rounds: list[dict[str, Side]]) -> dict[str, float]:
    """What the rounds show of the machine and of what was planted."""
    ratios = {
        name: [log(one[name].targets_per_second / one["baseline"].targets_per_second) for one in rounds]
        for name in PLANTED
        if name != "baseline"
    }
    steps = [log(b["baseline"].targets_per_second / a["baseline"].targets_per_second) for a, b in pairwise(rounds)]
    return {
        "spread_between_processes": fmean(step**2 / 2 for step in steps) ** 0.5,
        "median_window_error": median(side.window_error for one in rounds for side in one.values()),
        **{f"{name}_median_ratio": exp(median(found)) for name, found in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the preset nano")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--updates", type=int, default=40, help="a window")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < max(REPEATS) + MOST_PAIRS:
        parser.error(f"--rounds {options.rounds}: a study takes up to {max(REPEATS)} repeats and {MOST_PAIRS} pairs")
    config = load("nano", options.set).with_execution({"micro_batch_size": 8, "update": "eager", "cpu_threads": 1})
    rounds: list[dict[str, Side]] = []
    begin = time.perf_counter()
    with ExitStack() as stack:
        machine = Machine(config, options.updates, stack)
        for index in range(options.rounds):
            order = list(PLANTED)[:: -1 if index.bit_count() % 2 else 1]
            rounds.append({name: machine.side(name) for name in order})
            print(index, {name: round(rounds[-1][name].targets_per_second) for name in PLANTED}, flush=True)
    result = {
        "command": f"python tests/benchmarks/planted_slowdowns.py --set {' '.join(options.set)} "
        f"--rounds {options.rounds} --updates {options.updates}",
        "machine": {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "system": platform.machine()},
        "seconds": time.perf_counter() - begin,
        "noise": noise(rounds),
        "figures": [figures(rounds, repeats) for repeats in REPEATS],
        "targets_per_second": {name: [one[name].targets_per_second for one in rounds] for name in PLANTED},
        "window_errors": {name: [one[name].window_error for one in rounds] for name in PLANTED},
    }
    print(json.dumps({key: result[key] for key in ("noise", "figures")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
