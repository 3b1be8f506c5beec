"""How a study's time to the decision and its GPU hours change with the number of GPUs, under a simulated clock.

    python tests/benchmarks/replay_devices.py --seeds 20 --out tests/benchmarks/results/replay_devices.json

Tables as in `replay.py`. A fleet has nodes of four GPUs, whose speeds spread by 2.2% (three recorded GH200) and which
share their node's compile cache; the cluster is ready after 30 s, and every process of a candidate costs its start.
The study is the product's, asked whenever a GPU is free; the choice is verified in three interleaved pairs on one GPU,
or not at all with `--no-verification`. For each number of GPUs: seconds to the decision; GPU hours where all nodes
are held until then; GPU hours with the product's rule (`cluster/surplus.py`: once the study has nothing more to start,
idle nodes beyond room for the most trials that ever ran at once go back, and all idle ones once it verifies); how many
GPUs ever ran a trial; how much slower than the best row the choice is; how many executions the search measured twice.
"""

import argparse
import heapq
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay import BUDGET_SECONDS, Scenario, regret, scenarios, tables
from replay_machine import Machine, Table

from tinyllm_ray.records import Device, TrialRecord
from tinyllm_ray.search.answers import Finished, Trial
from tinyllm_ray.search.noise import device_name
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import InterleavedPairs

GPUS = (1, 4, 16, 64)
GPUS_A_NODE = 4
DEVICE_SPREAD = 0.022
READY_SECONDS = 30.0


@dataclass(frozen=True)
class Decision:
    """One study on one fleet."""

    seconds: float
    """To the decision, from the allocation's start."""
    held_hours: float
    """GPU hours with all nodes to the end."""
    returned_hours: float
    """GPU hours where idle nodes go back."""
    used_gpus: int
    trials: int
    regret: float
    repeated: int


class Fleet:
    """GPUs under one simulated clock."""

    def __init__(self, table: Table, seed: int, gpus: int) -> None:
        dice = random.Random(f"{table.name} {seed} fleet")
        self.gpus = gpus
        self.speeds = [1 + dice.gauss(0, DEVICE_SPREAD) for _ in range(gpus)]
        self.machines = [Machine(table, seed * 1000 + node) for node in range(-(-gpus // GPUS_A_NODE))]
        self.free = list(range(gpus))
        self.running: list[tuple[float, int, TrialRecord]] = []
        self.used: set[int] = set()
        self.returned: dict[int, float] = {}
        """When a node went back."""
        self.peak = 0

    def start(self, trial: Trial, now: float, freed: str | None = None) -> None:
        """Measure on the GPU that the trial asks for, else on the one just freed, else on the lowest of the free."""
        wanted = trial.device if trial.device is not None else freed
        gpu = int(wanted) if wanted is not None else min(self.free)
        self.free.remove(gpu)
        self.used.add(gpu)
        machine = self.machines[gpu // GPUS_A_NODE]
        record = machine.measure(trial.candidate.execution, trial.protocol, candidate=trial.candidate.id)
        record = on_device(record, gpu, self.speeds[gpu]).model_copy(update={"timestamp": now})
        if trial.stage == "control":
            record = record.model_copy(update={"purpose": "control"})
        if trial.stage == "verification":
            record = record.model_copy(update={"purpose": "verification", "round": trial.round})
        heapq.heappush(self.running, (now + (record.seconds.total or 0.0), gpu, record))
        self.peak = 1 if trial.stage == "verification" else max(self.peak, len(self.running))

    def next_end(self) -> tuple[float, TrialRecord]:
        now, gpu, record = heapq.heappop(self.running)
        self.free.append(gpu)
        return now, record

    def hand_back(self, now: float) -> None:
        """As `Surplus` does it: the first node is the driver's, and stays."""
        nodes = [node for node in range(len(self.machines)) if node not in self.returned]
        busy = {gpu // GPUS_A_NODE for _, gpu, _ in self.running}
        kept = [node for node in nodes if node == 0 or node in busy]
        idle = [node for node in nodes if node not in kept]
        while idle and sum(self.size(node) for node in kept) < self.peak:
            kept.append(idle.pop(0))
        self.returned |= dict.fromkeys(idle, now)
        self.free = [gpu for gpu in self.free if gpu // GPUS_A_NODE not in self.returned]

    def size(self, node: int) -> int:
        return min(GPUS_A_NODE, self.gpus - node * GPUS_A_NODE)

    def used_seconds(self, now: float) -> float:
        """GPU seconds until now."""
        return sum(self.size(node) * self.returned.get(node, now) for node in range(len(self.machines)))


def on_device(record: TrialRecord, gpu: int, speed: float) -> TrialRecord:
    """The record as this device makes it: rates by its speed; seconds change by too little to matter."""
    device = Device(kind="cuda", name="GH200", identifier=str(gpu), host=f"n{gpu // GPUS_A_NODE}")
    if record.targets_per_second is None or record.seconds_per_update is None:
        return record.model_copy(update={"devices": [device]})
    windows = [
        window.model_copy(update={"targets_per_second": window.targets_per_second * speed}) for window in record.windows
    ]
    changes = {"targets_per_second": record.targets_per_second * speed, "windows": windows, "devices": [device]}
    return record.model_copy(update={**changes, "seconds_per_update": record.seconds_per_update / speed})


def decide(
    table: Table, seed: int, gpus: int, scenario: Scenario, budget: float = BUDGET_SECONDS, verify: bool = True
) -> Decision:
    """The product's study on a fleet."""
    fleet = Fleet(table, seed, gpus)
    objective = Objective("training", scenario.tokens, scenario.runs)
    priors = Priors(table.space.device_kind).without(*table.without)
    verifier = InterleavedPairs() if verify else None
    study = Study(table.space, objective=objective, verifier=verifier, priors=priors, devices=gpus)
    now, searched, trials, told, freed = READY_SECONDS, Counter[str](), 0, 0, None
    while True:
        answer = study.ask(budget - now, freed) if fleet.free else None
        if isinstance(answer, Finished):
            break
        if isinstance(answer, Trial):
            trials += 1
            if answer.stage not in ("verification", "control"):
                searched[answer.candidate.execution_identity] += 1
            fleet.start(answer, now, freed)
            freed = None
        else:
            if answer is not None and told:
                fleet.hand_back(now)
            now, record = fleet.next_end()
            study.tell(record)
            told, freed = told + 1, device_name(record)
    selection = study.selection()
    lost = regret(selection.record.execution if selection else None, table, table.best_row.rate, table.band)
    repeated = sum(count - 1 for count in searched.values())
    held, returned = now * gpus / 3600, fleet.used_seconds(now) / 3600
    return Decision(now, held, returned, len(fleet.used), trials, lost, repeated)


def figures(decisions: Sequence[Decision]) -> dict[str, float]:
    def middle(name: str) -> float:
        return round(statistics.median(getattr(one, name) for one in decisions), 3)

    names = ("seconds", "held_hours", "returned_hours", "used_gpus", "trials", "regret")
    return {name: middle(name) for name in names} | {"repeated": max(one.repeated for one in decisions)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--gpus", type=int, nargs="*", default=GPUS)
    parser.add_argument("--only", nargs="*", help="names of tables")
    parser.add_argument("--no-verification", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("| table | to train | GPUs | s to the decision | GPU h held | GPU h handed back | used | trials | regret % |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for table in tables():
        if (options.only and table.name not in options.only) or table.space.device_kind != "cuda":
            continue
        for case in scenarios(table)[::2]:
            for gpus in options.gpus:
                verify = not options.no_verification
                made = [decide(table, seed, gpus, case, verify=verify) for seed in range(options.seeds)]
                told = figures(made)
                results.append({"table": table.name, "scenario": case.name, "gpus": gpus, **told})
                cells = [f"{told['seconds']:.0f}", f"{told['held_hours']:.2f}", f"{told['returned_hours']:.2f}"]
                cells += [f"{told['used_gpus']:.0f}", f"{told['trials']:.0f}", f"{100 * told['regret']:.1f}"]
                print(f"| {table.name} | {case.name} | {gpus} | {' | '.join(cells)} |", flush=True)
    if options.out:
        command = f"python tests/benchmarks/replay_devices.py --seeds {options.seeds}"
        options.out.write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
