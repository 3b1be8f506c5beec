"""Records the table that `replay.py --table` plays: what every execution of interest does on this machine.

    python tests/benchmarks/record_table.py --out h200_table.jsonl --limit-seconds 1500
    python tests/benchmarks/replay.py --table h200_table.jsonl

20m at 32,768 tokens an update on a GPU: the baseline; micro-batches 32 to 4 x eager, default, reduce-overhead and
graph x cudnn, flash and efficient; kernel settings (and flash4 where it is installed) together and one at a time at the
best three rows; max-autotune.
What tells most comes first, as a row takes half a minute: the kinds that may win, the kernels at the better of them
(some 16 runs), then the rest of the grid, the nearest to the winner first. The first row of each kind is run twice, for
what a first update takes with its compilation cached. A record a line, in the form of a study's trials.jsonl, written
as it comes; started again with the same --out it goes on where it stopped. Nothing is started that would not end within
--limit-seconds. --plan shows what is still to run, as far as it does not depend on rows to come.

    python tests/benchmarks/record_table.py --device cpu --preset nano --limit-seconds 120 --out nano.jsonl
"""

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tinyllm_ray.config import Config, identity, load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.execution import ExecutionConfig, needs_gpu
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.model.attention import available_backends
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord, read_records
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.kinds import kind_of
from tinyllm_ray.search.rates import ranked
from tinyllm_ray.train.launcher import Launcher

SIZES = (32, 16, 8, 4)
DEFAULT: dict[str, Any] = {"update": "compiled", "compile_mode": "default"}
GRAPH: dict[str, Any] = {"update": "graph", "compile_mode": "default"}
REDUCE_OVERHEAD: dict[str, Any] = {"update": "compiled", "compile_mode": "reduce-overhead"}
KINDS = (GRAPH, DEFAULT, REDUCE_OVERHEAD, {"update": "eager"})
BACKENDS = ("cudnn", "flash", "efficient")
"""These three and the sizes with what is expected to be fastest first."""
KERNELS: tuple[dict[str, Any], ...] = (
    {"loss_kernel": "triton"},
    {"residual_dtype": "bfloat16"},
    {"optimizer_kernel": "triton"},
    {"norm_kernel": "triton"},
    {"rotary_kernel": "triton"},
    {"activation_kernel": "triton"},
)
"""What is expected to gain most first."""
FLASH4: dict[str, Any] = {"sdpa_backend": "flash4"}
"""One more of these where it is installed."""
BEST_ROWS = 3
LONGEST_SECONDS = 400.0
"""Of one row: max-autotune compiles for 130 s."""


def plan(config: Config, device: str, records: list[TrialRecord]) -> Iterator[tuple[dict[str, Any], int]]:
    """Executions in the order of their worth, each with how often it is run; later ones depend on earlier rows."""
    backends = BACKENDS if device == "cuda" else ("auto", "math")
    largest = {"micro_batch_size": min(SIZES[0], config.rows_per_model)}
    begin = [{**largest, "sdpa_backend": "auto", **DEFAULT}]
    begin += [{**largest, "sdpa_backend": backends[0], **kind} for kind in (GRAPH, REDUCE_OVERHEAD)]
    sizes = [size for size in SIZES if config.rows_per_model % size == 0]
    grid = [
        (places, {"micro_batch_size": size, "sdpa_backend": backend, **kind})
        for places, (size, kind, backend) in _by_places(sizes, KINDS, backends)
    ]
    grid.sort(key=lambda one: sum(one[0]))
    first = _settled(begin, device)
    rest = _settled([settings for _, settings in grid], device)
    seen: set[str] = set()
    for part, best in ((first, 1), (rest, BEST_ROWS)):
        for execution in part:
            yield execution, 1 if kind_of(execution) in seen else 2
            seen.add(kind_of(execution))
        yield from ((execution, 1) for execution in _with_kernels(part, records, best, device))
    autotuned = {"update": "compiled", "compile_mode": "max-autotune"}
    for execution in _settled([{**largest, "sdpa_backend": backend, **autotuned} for backend in backends], device):
        yield execution, 1


def _by_places(*lists: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """The product of the lists, each with the places of its parts."""
    for pairs in itertools.product(*(enumerate(values) for values in lists)):
        yield tuple(place for place, _ in pairs), tuple(value for _, value in pairs)


def _with_kernels(
    part: list[dict[str, Any]], records: list[TrialRecord], best: int, device: str
) -> Iterator[dict[str, Any]]:
    """The best rows of the part with all kernel settings, and with each alone."""
    names = {identity(execution) for execution in part}
    installed = device == "cuda" and not available_backends(device)["flash4"]
    kernels = (*KERNELS, FLASH4) if installed else KERNELS
    together = {key: value for kernel in kernels for key, value in kernel.items()}
    for record in ranked(record for record in records if record.execution_identity in names)[:best]:
        yield from _settled([{**record.execution, **settings} for settings in (together, *kernels)], device)


def _settled(settings: Iterable[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    return [execution for one in settings if (execution := settle(one, device)) is not None]


def settle(settings: dict[str, Any], device: str) -> dict[str, Any] | None:
    """A whole execution; None where this device cannot run it."""
    threads = {"cpu_threads": 8 if device == "cuda" else 2}
    execution = ExecutionConfig.model_validate({**threads, **settings}).model_dump(mode="json")
    refused = device == "cpu" and any(needs_gpu(key, value) for key, value in execution.items())
    return None if refused else execution


def upcoming(config: Config, device: str, records: list[TrialRecord]) -> dict[str, Any] | None:
    """The first execution of the plan that has not been run as often as it should."""
    done = Counter(record.execution_identity for record in records)
    return next((one for one, times in plan(config, device, records) if done[identity(one)] < times), None)


def to_come(config: Config, device: str, records: list[TrialRecord]) -> Iterator[str]:
    """A line for each execution still to run."""
    done = Counter(record.execution_identity for record in records)
    shown: set[str] = set()
    for execution, times in plan(config, device, records):
        name = identity(execution)
        if name not in shown and (left := times - done[name]) > 0:
            yield f"{make_candidate(1, execution).label}{'' if left == 1 else f' x {left}'}"
        shown.add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="records, a JSON line each; gone on with where it exists"
    )
    parser.add_argument("--limit-seconds", type=float, default=1500.0)
    parser.add_argument("--preset", default="20m-32k")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--window-seconds", type=float, default=0.85, help="of each of the three windows")
    parser.add_argument("--data-mode", choices=("real", "synthetic"), default="real")
    parser.add_argument("--plan", action="store_true", help="show what is still to run, and run nothing")
    options = parser.parse_args()
    began, config = time.monotonic(), load(options.preset)
    # By time: 50 updates take 0.85 s at the fastest row, 11 s at the slowest.
    protocol = Protocol(version="adaptive", data_mode=options.data_mode, window_seconds=options.window_seconds)
    records = read_records(options.out) if options.out.exists() else []
    if options.plan:
        print("\n".join(to_come(config, options.device, records)))
        return
    cache = open_cache(default_cache()) if options.data_mode == "real" else None
    work, folder = config.model.parameters * config.targets_per_update, Path(tempfile.mkdtemp())
    source = source_identity()
    with Launcher(
        folder, str(folder / "compile"), collect_environment, {"sha256": source.sha256, "dirty": source.dirty}
    ) as launcher:
        while execution := upcoming(config, options.device, records):
            cost = CostModel(options.device, work, protocol, tuple(records)).predict(execution)
            left = options.limit_seconds - (time.monotonic() - began)
            candidate = make_candidate(len(records) + 1, execution)
            if cost.upper_seconds > left:
                print(f"{left:.0f} s are left, {candidate.label} needs up to {cost.upper_seconds:.0f} s: run it again")
                return
            record = launcher.run(
                {
                    "study": "record_table",
                    "candidate": candidate.id,
                    "label": candidate.label,
                    "config": config.with_execution(execution).model_dump(mode="json"),
                    "protocol": protocol.model_dump(),
                    "cache": str(cache.folder) if cache else None,
                    "cache_identity": cache.identity if cache else None,
                    "configuration": None,
                    "limit_seconds": min(left, LONGEST_SECONDS),
                }
            )
            if record.fate == Fate.TIMED_OUT and left < LONGEST_SECONDS:
                print(f"{candidate.label} did not end within what was left: run it again")
                return
            # The environment is the same in every line; the first says it.
            record = record.model_copy(update={"environment": {} if records else record.environment})
            records.append(record)
            with options.out.open("a") as file:
                file.write(record.model_dump_json() + "\n")
            shown = record.targets_per_second or 0.0
            print(f"{candidate.label}: {record.fate} {shown:,.0f} targets/s, {json.dumps(record.seconds.model_dump())}")
    print(f"the table is complete: {len(records)} records")


if __name__ == "__main__":
    main()
