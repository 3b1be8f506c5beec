"""Packed models against the same trained one after the other, by processes that share the device, and as one model.

    python tests/benchmarks/packed_models.py --preset nano --models 2 --rows 2 --warmup 2 --updates 2 --windows 2 \\
        --execution cpu_threads=1 --execution cpu_threads=1 packed_backward=processes

does it on two CPU cores in a minute. On one H200, each meant for a call of under 5 minutes (`timeout 290`): goals,
numbers of models, executions of packs, the fast update (FAST is every setting of it below). Each prepares its graphs
side by side; one that compiles alone takes some 20 s.

    python tests/benchmarks/packed_models.py --preset packed4-20m-awc packed8-20m-awc 20m-32k --models 8 --rows 4 \\
        --ways packed one_after_another --execution update=compiled --execution update=graph FAST \\
        --prepare 8 --out goals.json
    python tests/benchmarks/packed_models.py --preset 20m-32k --models 1 2 4 --rows 4 --updates 15 \\
        --ways packed one_after_another processes --execution update=compiled \\
        --execution update=compiled packed_backward=processes --prepare 8 --out numbers.json
    python tests/benchmarks/packed_models.py --preset packed4-20m-awc packed8-20m-awc --ways packed --prepare 8 \\
        --execution update=compiled packed_backward=at_once --execution update=compiled packed_backward=one_by_one \\
        --execution update=compiled packed_backward=processes --execution update=graph packed_backward=at_once \\
        --execution update=graph FAST packed_backward=at_once --out executions.json
    python tests/benchmarks/packed_models.py --preset 20m-32k --models 8 --rows 4 \\
        --ways packed one_after_another alone --execution update=compiled compile_mode=reduce-overhead \\
        --execution update=graph --execution update=graph loss_kernel=triton --execution update=graph FAST \\
        --prepare 8 --out fast.json

The second once more with --models 8 16 has the larger numbers.

A preset of packed models is measured as it is. Any other is packed by --models, unmixed, every model at --rows rows an
update and with its own seed. Ways, each in processes of their own:

packed              the models in one process, by every --execution (packed_backward=processes gives each model one of
                    its own for forward and backward, and is told apart in the ratios)
one_after_another   the same trainings, each alone on the device: all their targets by all their windows' seconds; at
                    most --most-alone of them are run, as they differ in seeds alone
processes           the same trainings at once, a process each, counted while all are inside their windows; without
                    MPS a GPU takes turns between them
alone               the yardstick: one model at the tokens that an update of all of them has, default micro-batches

Mixed models are one training, so packed and alone are all they have; of --models 1 alone is all there is, and what any
number of them reaches one after another. What an execution's recipe refuses is left out with a line. The real trainer
runs, on the default corpus (--tokens synthetic: a batch that stays on the device): --warmup updates, --windows windows
of --updates updates between two waits for the device, and --part-updates updates by their parts. Throughput is the
median of the windows; starts and first updates (compilation) are told apart. Memory is summed over processes;
device_used_bytes is the whole device's. With --prepare N the rows' graphs are compiled first, N processes side by side,
and kernels are tuned again when a row is measured. Rows go to FILE as they end. Goals are those of one H200.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from packed_figures import ratios, show, summarize
from packed_probes import compile_only, join, train_all

from tinyllm_ray.config import Config, load, validate
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.train.compile_cache import cache_variables
from tinyllm_ray.train.recipe import solo_config
from tinyllm_ray.yamlfile import parse_yaml

WAYS: dict[str, set[str]] = {
    "packed": {"optimizer_kernel"},
    "one_after_another": {"packed_backward"},
    "processes": {"packed_backward"},
    "alone": {"packed_backward", "micro_batch_size"},
}
"""The settings of an execution that each has no use for."""

KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel", "activation_kernel", "optimizer_kernel")
FAST = [*(f"{kernel}=triton" for kernel in KERNELS), "residual_dtype=bfloat16"]


class Row(NamedTuple):
    """What is measured."""

    label: dict[str, Any]
    processes: list[list[Config]]
    """What each process trains, one after the other."""


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **machine(), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(cache_variables(options.compile_cache or folder))  # read by the processes to come
        rows = list(plan(options))
        if options.prepare:
            report["prepared"] = prepare(rows, options)
        for row in rows:
            found = row.label | measure_row(row, options)
            report["rows"].append(found)
            report["ratios"] = ratios(report["rows"])
            show(found)
            if options.out:  # after each, as a later one may be cut short
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    for line in report.get("ratios", []):
        print(json.dumps(line))
    sys.exit(any("error" in row for row in report["rows"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["nano"])
    parser.add_argument("--models", type=int, nargs="+", default=[8], help="of a pack, where the preset is one model")
    parser.add_argument("--rows", type=int, default=4, help="of each of those in an update")
    parser.add_argument("--most-alone", type=int, default=4, help="trainings of one_after_another that are run")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument(
        "--execution", nargs="*", action="append", metavar="KEY=VALUE", help="once for each one; or FAST"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, like everywhere")
    parser.add_argument("--tokens", choices=("real", "synthetic"), default="real")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--updates", type=int, default=30, help="updates a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--part-updates", type=int, default=5, help="updates timed by their parts")
    parser.add_argument("--prepare", type=int, metavar="N", help="compile first, N processes side by side")
    parser.add_argument("--compile-cache", help="folder, like that of a command before (default: an empty one)")
    parser.add_argument("--out", type=Path, help="file for the result (default: printed only)")
    options = parser.parse_args()
    asked = [
        dict(item.split("=", 1) for word in settings for item in (FAST if word == "FAST" else [word]))
        for settings in options.execution or [[]]
    ]
    options.executions = [{key: parse_yaml(text, key) for key, text in settings.items()} for settings in asked]
    options.cache = str(default_cache()) if options.tokens == "real" else None
    return options


def machine() -> dict[str, Any]:
    found = collect_environment()
    kept = {name: found[name] for name in ("python", "versions", "cuda", "cudnn", "driver", "gpus", "cpu")}
    return {"environment": kept, "source_identity": source_identity().sha256}


def plan(options: argparse.Namespace) -> Iterator[Row]:
    """Every row, each once: executions that differ in what a way has no use for are one."""
    seen = set()
    for preset in options.preset:
        base = load(preset, options.set)
        for models in [base.packing.models] if base.packing.models > 1 else options.models:
            config = pack(base, models, options.rows)
            ways = options.ways if models > 1 else ["alone"]
            for way, asked in itertools.product(ways, options.executions):
                execution = {key: value for key, value in asked.items() if key not in WAYS[way]}
                label = {"preset": preset, "models": models, "way": way, "execution": execution}
                if (name := json.dumps(label, sort_keys=True)) in seen:
                    continue
                seen.add(name)
                try:
                    processes = trainings(config, way, execution, options.most_alone)
                except ConfigError as error:
                    print(f"left out: {name}: {error}", flush=True)
                    continue
                if processes:
                    first = processes[0][0]
                    settled = {"rows_a_model": config.rows_per_model, "micro_batch_size": first.micro_batch_size}
                    settled["targets_per_update"] = config.targets_per_update
                    settled["packed_backward"] = first.packed_backward if way == "packed" else None
                    yield Row(label | settled, processes)


def pack(base: Config, models: int, rows: int) -> Config:
    """`models` of the preset: mixed ones as they are, others at `rows` rows and with a seed each."""
    if base.packing.models > 1:
        return base
    values = base.model_dump(mode="json")
    values["training"]["tokens_per_update"] = rows * base.model.context
    seeds = [{"seed": base.training.seed + number} for number in range(models)]
    values["packing"] = {"models": models, "variants": seeds if models > 1 else None}
    return validate(values, "--models")


def trainings(config: Config, way: str, execution: dict[str, Any], most_alone: int) -> list[list[Config]]:
    """What each process of a way trains; none where mixed models have no such way."""
    if way == "packed":
        return [[config.with_execution(execution)]]
    if way == "alone":
        values = config.model_dump(mode="json", exclude={"packing"})
        values["training"]["tokens_per_update"] = config.targets_per_update
        return [[validate(values, "alone").with_execution(execution)]]
    if config.packing.mixed:
        return []
    solos = [solo_config(config, worker).with_execution(execution) for worker in range(config.packing.models)]
    return [solos[:most_alone]] if way == "one_after_another" else [[solo] for solo in solos]


def prepare(rows: list[Row], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fill the compile cache; the seconds of each first update, N side by side."""
    firsts = {}
    for row in rows:
        config = row.processes[0][0]  # one process's trainings share their graph, and so do processes
        models = 1 if config.packed_backward == "processes" else config.packing.models
        if config.execution.update != "eager":
            firsts[str((config.model, config.execution, models, config.micro_batch_size))] = row
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.prepare, spawn, max_tasks_per_child=1) as pool:
        futures = {pool.submit(compile_only, row.processes[0][0]): row for row in firsts.values()}
    found = []
    for future, row in futures.items():
        error = future.exception()
        found.append(row.label | ({"error": str(error)} if error else {"first_update_seconds": future.result()}))
        print("prepared:", json.dumps(found[-1]), flush=True)
    for choice in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        choice.unlink()  # Inductor's choice of a kernel's launch, here timed while others used the device
    return found


def measure_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Its processes, from start to end; of one that fails the row says why."""
    protocol = Protocol(
        data_mode=options.tokens,
        warmup_updates=options.warmup,
        windows=options.windows,
        updates_per_window=options.updates,
    )
    spawn, count = multiprocessing.get_context("spawn"), len(row.processes)
    shared = (spawn.Barrier(count), spawn.Value("i", 0))
    parts = options.part_updates if count == 1 else 0  # of processes that take turns they would say little
    with ProcessPoolExecutor(count, spawn, initializer=join, initargs=shared) as pool:
        futures = [pool.submit(train_all, configs, protocol, options.cache, parts) for configs in row.processes]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        # Those who only waited for it say less than the one that failed.
        first = min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return {"error": f"{type(first).__name__}: {first}"}
    return summarize(row.label, [future.result() for future in futures])


if __name__ == "__main__":
    main()
