"""What timing by need takes and where it errs: seconds, and how often one is stopped that equals the best.

    python tests/benchmarks/windows_by_need.py --candidates 2000 --out tests/benchmarks/results/windows_by_need.json

A candidate with a known distance to the best is timed as a process of the search is: `measure.windows` under a
simulated clock, noise of windows, interrupted windows and processes as in `verification_power.py`. The bar is that of
the luckiest of some equally good processes, as a search's incumbent is. No device, a minute of one core.
"""

import argparse
import json
import math
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from noisy_device import OUTLIERS, a_record
from verification_power import HALF_RANGES, RECORDED_SPREADS

from tinyllm_ray.measure.band import CHECKED_UPDATES
from tinyllm_ray.measure.need import Bar
from tinyllm_ray.measure.windows import Measurement, measure
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.noise import NoiseOfWindows, bar_of
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.rates import HALF_RANGE_OF_THREE

BY_COUNT, BY_NEED = Protocol(), Protocol().by_need(CHECKED_UPDATES[-1])
CLOSE = BY_NEED.model_copy(update={"windows": 8})
"""What one takes that is close to the best."""
RATE = 1.9e6
TARGETS = 32_768
REFERENCE_SECONDS = 1.7
"""Of the windows that half ranges were recorded of."""
SLOWER = (0.0, 0.01, 0.02, 0.05, 0.1, 0.3)
LUCKY = (1, 4, 10)
"""Equally good processes, the best of which is the incumbent."""


@dataclass
class Process:
    """A process of an execution: its own level, and noise that is alike in every half second."""

    dice: random.Random
    level: float
    """Logarithm of its throughput over RATE."""
    half_range: float
    targets_per_update: int = TARGETS
    data_wait_seconds: float = 0.0
    now: float = 0.0
    queued: int = 0

    def step(self) -> None:
        self.queued += 1

    def synchronize(self) -> None:
        plain = self.queued * TARGETS / RATE
        spread = self.half_range / HALF_RANGE_OF_THREE * math.sqrt(REFERENCE_SECONDS / max(plain, 1e-9))
        log = self.level + self.dice.gauss(0, min(spread, 0.05))
        if self.dice.random() < OUTLIERS * plain / REFERENCE_SECONDS:
            log -= self.dice.uniform(0.01, 0.05) * REFERENCE_SECONDS / plain
        self.now += plain * math.exp(-log)
        self.queued = 0

    def read(self) -> tuple[float, float]:
        return 4.0, 1.0

    def measure(self, protocol: Protocol, bar: Bar | None = None) -> Measurement:
        return measure(self, protocol, clock=lambda: self.now, wall_clock=lambda: self.now, bar=bar)


def _record(found: Measurement) -> TrialRecord:
    return a_record("one", windows=list(found.windows), targets_per_second=found.targets_per_second)


def figures(spread: float, half_range: float, slower: float, lucky: int, count: int) -> dict[str, float]:
    """Of so many candidates that are `slower` than an incumbent which is the luckiest of `lucky` processes."""
    dice = random.Random(f"{spread} {half_range} {slower} {lucky}")
    need, counted, stopped, errors = [], [], 0, []
    for _ in range(count):
        own = dice.choice(RECORDED_SPREADS) if math.isnan(spread) else spread
        known = [_record(Process(dice, dice.gauss(0, own), half_range).measure(BY_COUNT))]
        known += [_record(Process(dice, dice.gauss(0, own), half_range).measure(CLOSE)) for _ in range(lucky - 1)]
        best = max(known, key=lambda one: one.targets_per_second or 0.0)
        bar = bar_of(best, CAUTIOUS_SPREAD, noise=NoiseOfWindows(known))
        level = math.log1p(-slower) + dice.gauss(0, own)
        found = Process(dice, level, half_range).measure(BY_NEED, bar)
        stopped += found.dominated is not None
        need.append(found.warmup_seconds + sum(window.seconds for window in found.windows))
        plain = Process(dice, level, half_range).measure(BY_COUNT)
        counted.append(plain.warmup_seconds + sum(window.seconds for window in plain.windows))
        errors.append([math.log(one.targets_per_second / RATE) - level for one in (found, plain)])
    return {
        "stopped": round(stopped / count, 4),
        "seconds": round(statistics.mean(need), 2),
        "seconds_by_count": round(statistics.mean(counted), 2),
        "error": round(statistics.pstdev(one for one, _ in errors), 5),
        "error_by_count": round(statistics.pstdev(one for _, one in errors), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=2000, help="a row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for spread in (math.nan, 0.0025, 0.005, 0.01):
        for half_range in HALF_RANGES:
            for lucky in LUCKY:
                for slower in SLOWER if lucky == LUCKY[1] else SLOWER[:1]:
                    name = "recorded" if math.isnan(spread) else spread
                    case = {"process_spread": name, "half_range": half_range, "best_of": lucky, "slower": slower}
                    rows.append(case | figures(spread, half_range, slower, lucky, options.candidates))
                    print(json.dumps(rows[-1]), flush=True)
    if options.out:
        command = f"python tests/benchmarks/windows_by_need.py --candidates {options.candidates}"
        options.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
