"""Where one candidate's seconds go, without Ray: start, first update, warm-up, windows, and what is left over.

    python tests/benchmarks/trial_phases.py --preset 20m-32k --execution micro_batch_size=32 update=compiled
    python tests/benchmarks/trial_phases.py --preset nano --updates 3     # on two CPU cores

Runs every execution --repeats times in processes forked from one starter, over one compile cache (a fresh one with
--cold), and prints a JSON line a trial: the first repeat compiles cold, the others warm.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tinyllm_ray.config import load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher
from tinyllm_ray.yamlfile import parse_yaml


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--execution", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=100, help="updates a window")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--data-mode", choices=("real", "synthetic"), default="real")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    settings = dict(item.split("=", 1) for item in options.execution)
    config = load(options.preset).with_execution({key: parse_yaml(value, key) for key, value in settings.items()})
    cache = open_cache(default_cache()) if options.data_mode == "real" else None
    compile_cache = tempfile.mkdtemp() if options.cold else compile_cache_folder()
    logs = Path(tempfile.mkdtemp())
    with Launcher(logs, compile_cache, dict, {"sha256": "benchmark", "dirty": None}) as launcher:
        for repeat in range(options.repeats):
            request = {
                "study": "trial_phases",
                "candidate": f"repeat{repeat}",
                "label": "",
                "config": config.model_dump(mode="json"),
                "protocol": {
                    "data_mode": options.data_mode,
                    "warmup_updates": 20,
                    "windows": 3,
                    "updates_per_window": options.updates,
                },
                "cache": str(cache.folder) if cache else None,
                "cache_identity": cache.identity if cache else None,
                "configuration": None,
                "limit_seconds": 300,
            }
            record = launcher.run(request)
            kept = record.model_dump(
                include={"fate", "reason", "targets_per_second", "seconds", "start_stage_seconds", "memory"}
            )
            waits = sum(window.data_wait_seconds for window in record.windows)
            learned = [(window.loss, window.grad_norm) for window in record.windows]
            line = {"repeat": repeat, **settings, **kept, "data_wait_seconds": waits, "loss_and_grad_norm": learned}
            print(json.dumps(line), flush=True)
            if record.fate != "complete":
                print((logs / f"repeat{repeat}.log").read_text()[-3000:])


if __name__ == "__main__":
    main()
