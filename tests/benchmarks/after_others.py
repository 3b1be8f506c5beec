"""The A/A test: does a candidate that is measured after others equal one that is measured alone?

    python tests/benchmarks/after_others.py --set model.context=32 training.tokens_per_update=256 --out FILE  # CPU
    python tests/benchmarks/after_others.py --preset 20m-32k --execution micro_batch_size=32 update=compiled --out FILE

Pairs of processes through the real launcher, in the order alone, after, after, alone, ...: alone in a starter of its
own that nothing ran in before; after in one where a candidate has run out of memory, another has compiled, and a third
was killed in the middle of its updates. The verdict is that of `search.pairs`, with the spread that processes of either
kind show among themselves; windows and figures of all are in the output.
"""

import argparse
import json
import platform
import resource
import tempfile
import time
from pathlib import Path

import torch

from tinyllm_ray.config import Config, load
from tinyllm_ray.measure.bounds import window_error
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.noise import learned_spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, Pair, Side, judge
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher
from tinyllm_ray.yamlfile import parse_yaml

ADDRESS_SPACE_BYTES = 64 * 2**30
"""On a CPU, so that a model of 512 GB is refused at once and never drives the machine into its memory's end."""


class Machine:
    """Runs candidates, each kind as its part in the test asks."""

    def __init__(self, config: Config, seconds: float, compile_cache: str) -> None:
        self._config = config
        self._seconds = seconds
        self._compile_cache = compile_cache
        self._logs = Path(tempfile.mkdtemp())
        self.others: list[str] = []
        """How the other candidates ended."""

    def alone(self) -> TrialRecord:
        with self._launcher() as launcher:
            return self._measured(launcher)

    def after(self) -> TrialRecord:
        with self._launcher() as launcher:
            compiled = self._config.with_execution({"update": "compiled", "compile_mode": "default"})
            for config, name, limit in (
                (self._too_large(), "too-large", 120.0),
                (compiled, "compiled", 300.0),
                (self._config, "endless", 15.0),
            ):
                record = launcher.run(self._request(config, name, limit, windows=10**9 if name == "endless" else 1))
                self.others.append(f"{name}: {record.fate.value}, {record.reason}")
            return self._measured(launcher)

    def _launcher(self) -> Launcher:
        return Launcher(self._logs, self._compile_cache, dict, {"sha256": "benchmark", "dirty": None})

    def _measured(self, launcher: Launcher) -> TrialRecord:
        record = launcher.run(self._request(self._config, "measured", 300.0, windows=3, version="adaptive"))
        assert record.fate == Fate.COMPLETE, (record.reason, (self._logs / "measured.log").read_text()[-2000:])
        return record

    def _request(self, config: Config, name: str, limit: float, **protocol: object) -> dict[str, object]:
        lengths = {"warmup_updates": 20, "updates_per_window": 1, "least_seconds": self._seconds}
        return {
            "study": "after_others",
            "candidate": name,
            "label": name,
            "config": config.model_dump(mode="json"),
            "protocol": {"data_mode": "synthetic", **lengths, **protocol},
            "cache": None,
            "cache_identity": None,
            "configuration": None,
            "limit_seconds": limit,
        }

    def _too_large(self) -> Config:
        values = self._config.model_dump(mode="json")
        if torch.cuda.is_available():
            rows = 4096  # logits of 268 GB for 20m
            values["training"]["tokens_per_update"] = rows * values["model"]["context"]
            values["execution"] |= {"micro_batch_size": rows, "update": "eager", "compile_mode": None}
        else:
            values["model"]["vocab_size"] = 2_000_000_000
        return Config.model_validate(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--execution", nargs="*", default=["micro_batch_size=8", "update=eager"], metavar="KEY=VALUE")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of windows a process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, hard))
    settings = dict(item.split("=", 1) for item in options.execution)
    config = load(options.preset, options.set).with_execution(
        {key: parse_yaml(value, key) for key, value in settings.items()}
    )
    machine = Machine(config, options.seconds, compile_cache_folder())
    begin = time.perf_counter()
    records: dict[str, list[TrialRecord]] = {"alone": [], "after": []}
    for index in range(options.pairs):
        order = ("after", "alone") if index.bit_count() % 2 else ("alone", "after")
        for part in order:
            records[part].append(getattr(machine, part)())
            print(f"{part}: {records[part][-1].targets_per_second:,.0f} targets/s", flush=True)
    result = _verdict(records) | {
        "command": f"python tests/benchmarks/after_others.py --preset {options.preset} --set {' '.join(options.set)} "
        f"--execution {' '.join(options.execution)} --pairs {options.pairs} --seconds {options.seconds}",
        "machine": {"torch": torch.__version__, "device": _device(), "system": platform.machine()},
        "seconds": time.perf_counter() - begin,
        "others": machine.others,
    }
    print(json.dumps(result["verdict"]))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _verdict(records: dict[str, list[TrialRecord]]) -> dict[str, object]:
    rates = {part: [record.targets_per_second or 0.0 for record in found] for part, found in records.items()}
    spread = learned_spread(rates.values(), CAUTIOUS_SPREAD)
    pairs = [Pair(_side(after), _side(alone)) for after, alone in zip(records["after"], records["alone"], strict=True)]
    verdict = judge(pairs, spread)
    return {
        "verdict": {
            "after_over_alone": verdict.ratio,
            "low": verdict.low,
            "high": verdict.high,
            "outcome": verdict.outcome,
            "spread_between_processes": spread.value,
        },
        "targets_per_second": rates,
        "windows": {
            part: [[window.targets_per_second for window in record.windows] for record in found]
            for part, found in records.items()
        },
    }


def _side(record: TrialRecord) -> Side:
    assert record.targets_per_second is not None
    return Side(record.targets_per_second, window_error([window.targets_per_second for window in record.windows]))


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"


if __name__ == "__main__":
    main()
