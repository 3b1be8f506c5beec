"""How often a verification is right: planted slowdowns, equal candidates, and intervals, over simulated studies.

    python tests/benchmarks/verification_power.py --studies 300 --out tests/benchmarks/results/verification_power.json

Each study searches once and then verifies under noise: processes, windows, drift, interrupted windows (`NoisyDevice`
in tests/search). A row is one size of noise; the first ones draw it for every study from what was recorded on GH200
and H200. Seconds are the simulated ones that a verification of one finalist takes. 300 studies a cell take three
minutes of one core.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from noisy_device import NoisyDevice, Told, verify

from tinyllm_ray.search.noise import learned_spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD

RECORDED_SPREADS = (0.0003, 0.0005, 0.0006, 0.0008, 0.0011, 0.0012, 0.0019, 0.0025, 0.0032, 0.0049)
"""Standard deviations of log throughput of processes that ran equal kernels, by group: final-20m cold and warm, three
tuner rows at micro-batch 32, H200 compiled twice, H200 three times, nocache-a/b, H200 eager twice, three rows of the
H200 study, three max-autotune rows, rope-a/b, three tuner rows at micro-batch 16."""
HALF_RANGES = (0.002, 0.005, 0.016)
PLANTED = (0.0, 0.01, 0.02)

Noise = Callable[[int], NoisyDevice]


def recorded(seed: int) -> NoisyDevice:
    generator = random.Random(seed)
    half_range = math.exp(generator.uniform(math.log(0.002), math.log(0.016)))
    return NoisyDevice(generator.choice(RECORDED_SPREADS), half_range, seed=seed)


def fixed(process_spread: float, half_range: float) -> Noise:
    return lambda seed: NoisyDevice(process_spread, half_range, seed=seed)


def figures(noise: Noise, studies: int, repeats: int = 0, budget: float = math.inf) -> dict[str, float]:
    """Shares of studies that are right, by what was planted."""
    row: dict[str, float] = {}
    for planted in PLANTED:
        told = [_study(noise, seed + int(1e6 * planted), planted, repeats, budget) for seed in range(studies)]
        verdicts = [one.outcome.verdicts["candidate"] for one in told]
        covered = sum(verdict.low <= 1 - planted <= verdict.high for verdict in verdicts) / studies
        share = sum(verdict.outcome == "slower" if planted else verdict.differs for verdict in verdicts) / studies
        name = f"slower_by_{planted:.0%}" if planted else "equal"
        row |= {
            f"{name}_called_{'slower' if planted else 'different'}": share,
            f"{name}_covered": covered,
            f"{name}_pairs": round(sum(verdict.pairs for verdict in verdicts) / studies, 2),
            f"{name}_seconds": round(sum(one.seconds for one in told) / studies),
        }
    return row


def _study(noise: Noise, seed: int, planted: float, repeats: int, budget: float) -> Told:
    device = noise(seed)
    spread = CAUTIOUS_SPREAD
    if repeats:
        levels = random.Random(-seed - 1)
        control = [math.exp(levels.gauss(0, device.process_spread)) for _ in range(repeats)]
        spread = learned_spread([control], CAUTIOUS_SPREAD)
    return verify(device, {"baseline": 0.0, "candidate": math.log1p(-planted)}, budget, spread)


def equal_finalists(noise: Noise, studies: int) -> dict[str, float]:
    """Three finalists that equal the baseline: how often a study calls any of them different."""
    told = [verify(noise(seed), dict.fromkeys(("baseline", "one", "two", "three"), 0.0)) for seed in range(studies)]
    wrong = sum(any(verdict.differs for verdict in one.outcome.verdicts.values()) for one in told)
    return {"any_of_three_called_different": wrong / studies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=300, help="a cell")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []

    def note(**row: object) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            result = {
                "command": f"python tests/benchmarks/verification_power.py --studies {options.studies}",
                "studies": options.studies,
                "rows": rows,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    note(noise="recorded", **figures(recorded, 2 * options.studies), **equal_finalists(recorded, options.studies))
    for budget in (190.0, 300.0):
        note(noise="recorded", budget_seconds=budget, **figures(recorded, 2 * options.studies, budget=budget))
    for process_spread in (0.001, 0.0025, 0.0035, 0.005, 0.0065, 0.008, 0.01):
        for half_range in HALF_RANGES:
            noise = fixed(process_spread, half_range)
            note(process_spread=process_spread, half_range=half_range, **figures(noise, options.studies))
    for process_spread in (0.01, 0.03):
        noise = fixed(process_spread, 0.005)
        found = figures(noise, options.studies, repeats=7)
        note(process_spread=process_spread, half_range=0.005, control_repeats=7, **found)


if __name__ == "__main__":
    main()
