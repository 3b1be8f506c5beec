"""What the guard against non-finite updates costs: windows of one trainer with it and of one without, in turns.

    python tests/benchmarks/guard_cost.py --preset 20m-32k --execution micro_batch_size=32 update=compiled
    python tests/benchmarks/guard_cost.py --preset nano --updates 3     # on two CPU cores

Without: no flag, no step that looks at one, no refusal to trace a second time. Prints a JSON line with the targets a
second of every window and the ratio of the medians.
"""

import argparse
import json
import time
from statistics import median

import torch

from tinyllm_ray.config import load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.train.graph_update import build_run
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Update, build_loss
from tinyllm_ray.yamlfile import parse_yaml


class Unguarded(Update):
    """An update that goes on whatever its numbers are, and however often it is traced."""

    def __init__(self, model, optimizer, config):
        super().__init__(model, optimizer, config)
        self._loss = build_loss(model, config, model.embedding.weight.device)

    def _guard(self, total, norm):
        pass


class UnguardedTrainer(Trainer):
    """A trainer whose updates are unguarded."""

    def _start(self, *arguments):
        super()._start(*arguments)
        unguarded = Unguarded(self.model, self.optimizer, self.config)
        self._trainee.run = build_run(unguarded.run, self.config, self.device)
        del self.optimizer.found_inf


def window(trainer, updates):
    """Targets a second over `updates` updates."""
    begin = time.perf_counter()
    for _ in range(updates):
        trainer.step()
    trainer.synchronize()
    return updates * trainer.targets_per_update / (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--execution", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=50, help="updates a window")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of one window with, two without, one with")
    options = parser.parse_args()
    settings = dict(item.split("=", 1) for item in options.execution)
    config = load(options.preset).with_execution({key: parse_yaml(value, key) for key, value in settings.items()})
    cache = open_cache(default_cache())
    found = {"with": [], "without": []}
    with Trainer(config, cache) as guarded, UnguardedTrainer(config, cache) as unguarded:
        trainers = {"with": guarded, "without": unguarded}
        for trainer in trainers.values():
            window(trainer, max(3, options.updates // 5))
        for _ in range(options.rounds):
            for name in ("with", "without", "without", "with"):
                found[name].append(window(trainers[name], options.updates))
    line = {"preset": options.preset, **settings, "updates_a_window": options.updates, "torch": torch.__version__}
    line["devices"] = [device.name for device in devices()]
    line["targets_per_second"] = {name: [round(rate) for rate in rates] for name, rates in found.items()}
    line["ratio"] = round(median(found["with"]) / median(found["without"]), 5)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
