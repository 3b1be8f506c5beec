"""Kinds of updates against plain compiled PyTorch, shape by shape, each in processes of its own.

    python tests/benchmarks/update_kinds.py --execution update=compiled --execution update=graph --prepare 8 \\
        --out kinds.json
    python tests/benchmarks/update_kinds.py --row 20m:32768:32 20m:32768:8 --processes 5 --out kernels.json \\
        --execution update=graph loss_kernel=triton norm_kernel=triton optimizer_kernel=triton

measure on one GPU; the first does all rows of TABLE. On two CPU cores, eager, which has no graph:

    python tests/benchmarks/update_kinds.py --row nano:2048:4 --execution update=eager --plain eager --processes 2 \\
        --warmup 1 --windows 2 --updates 2

A row is PRESET:TOKENS:MICRO: the preset's shape, targets an update, rows of a model in a micro-batch. A program is
plain PyTorch (`plain_pytorch.py`; beside a pack one model at all its targets) or the trainer under an --execution.
Every round runs each program of every row once, in a fresh process, odd rounds in the opposite order, so that what
drifts does not favour one; --processes is the number of rounds. A program that failed is not tried again.

Throughput is the median over processes of the median over their windows; the ratio to plain PyTorch has a bootstrap
interval (95%), for which processes are drawn again and windows within them. Times of the first update are cold in a
program's first process and warm in the others, unless --prepare N has filled the compile cache, N processes side by
side. The kernels of an update, by category and one by one, are those of a program's first process. FILE is
written after every process; --seconds ends a run early, with what it has by then.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from update_probe import configuration

from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import default_micro_batch_size
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.measure.kernels import by_category
from tinyllm_ray.records import KernelTime
from tinyllm_ray.train.compile_cache import cache_variables
from tinyllm_ray.yamlfile import parse_yaml

TABLE = {
    "20m:32768:32": (2.5e6, 2.9e6),
    "20m:131072:128": (2.6e6, 3.0e6),
    "20m:32768:8": (1.8e6, 2.2e6),
    "20m:32768:4": (1.45e6, 1.8e6),
    "50m:32768:32": (1.25e6, 1.4e6),
    "90m:32768:32": (0.68e6, 0.75e6),
    "packed4-20m-awc:131072:32": (2.3e6, 2.7e6),
    "packed8-20m-awc:131072:16": (2.2e6, 2.6e6),
}
"""Targets/s of the trainer on one H200 that every row must reach, and that it should."""
PLAIN = "plain"
DRAWS = 4_000

Request = dict[str, Any]


def main() -> None:
    options = parse()
    began = time.monotonic()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **machine(), "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(cache_variables(options.compile_cache or folder))  # read by the processes to come
        requests = list(plan(options))
        if options.prepare:
            prepare(requests, options)
        for row, program, request in rounds(requests, options.processes):
            if options.seconds and time.monotonic() - began > options.seconds:
                print("the time is over", flush=True)
                break
            runs = report["rows"].setdefault(row, {}).setdefault(program, [])
            if any("error" in run for run in runs):
                continue
            runs.append(run_process(request | {"profile": not runs}, options.limit))
            print(f"{row} {program}: {told(runs[-1])}", flush=True)
            report["summary"] = [summarize(name, programs) for name, programs in report["rows"].items()]
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    for line in report.get("summary", []):
        show(line)
    sys.exit(any("error" in run for programs in report["rows"].values() for runs in programs.values() for run in runs))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", action="extend", metavar="PRESET:TOKENS:MICRO", help="default: TABLE")
    parser.add_argument("--execution", nargs="+", action="append", metavar="KEY=VALUE", help="once for each one")
    parser.add_argument("--plain", choices=("compiled", "eager"), default="compiled")
    parser.add_argument("--processes", type=int, default=3, help="of each program")
    parser.add_argument("--tokens", choices=("real", "synthetic"), default="real", help="of the trainer")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60, help="updates a window")
    parser.add_argument("--prepare", type=int, metavar="N", help="compile first, N processes side by side")
    parser.add_argument("--compile-cache", help="folder, like that of a command before (default: an empty one)")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a process")
    parser.add_argument("--seconds", type=float, help="start no process after these")
    parser.add_argument("--out", type=Path, help="file for the result (default: printed only)")
    options = parser.parse_args()
    options.row = options.row or [*TABLE]
    asked = [dict(item.split("=", 1) for item in settings) for settings in options.execution or []]
    options.executions = [{key: parse_yaml(text, key) for key, text in settings.items()} for settings in asked]
    options.cache = str(default_cache()) if options.tokens == "real" else None
    return options


def machine() -> dict[str, Any]:
    found = collect_environment()
    kept = {name: found[name] for name in ("python", "versions", "cuda", "cudnn", "driver", "gpus", "cpu")}
    return {"environment": kept, "source_identity": source_identity().sha256}


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, Request]]:
    """Row, program and what its process is told; an execution that no configuration allows is left out with a line."""
    for row in options.row:
        preset, tokens, micro_batch = row.split(":")
        request = {
            "preset": preset,
            "tokens": int(tokens),
            "micro_batch": int(micro_batch),
            "plain_compiled": options.plain == "compiled",
            "cache": options.cache,
            "prepare": False,
            "profile": False,
            **{name: getattr(options, name) for name in ("warmup", "windows", "updates")},
        }
        config = configuration(request | {"execution": {}})
        alone = int(micro_batch) if config.packing.models == 1 else default_micro_batch_size(config.batch_rows)
        yield row, PLAIN, request | {"execution": None, "micro_batch": alone}
        for execution in options.executions:
            program = " ".join(f"{key}={value}" for key, value in execution.items())
            try:
                configuration(request | {"execution": execution})
            except ConfigError as error:
                print(f"left out: {row} {program}: {error}", flush=True)
            else:
                yield row, program, request | {"execution": execution}


def rounds(requests: Sequence[tuple[str, str, Request]], count: int) -> Iterator[tuple[str, str, Request]]:
    """All of them, `count` times; row after row, and within a row back and forth."""
    rows = list(dict.fromkeys(row for row, _, _ in requests))
    for number in range(count):
        for row in rows:
            own = [request for request in requests if request[0] == row]
            yield from reversed(own) if number % 2 else own


def prepare(requests: Sequence[tuple[str, str, Request]], options: argparse.Namespace) -> None:
    """Fill the compile cache; updates that are captured compile what compiled ones do."""
    unlike: dict[str, Request] = {}
    for _, _, request in requests:
        code = {key: value for key, value in (request["execution"] or {PLAIN: ""}).items() if key != "update"}
        shape = (request["preset"], request["tokens"], request["micro_batch"])
        unlike[json.dumps([shape, code], sort_keys=True)] = request | {"prepare": True}
    with ThreadPoolExecutor(options.prepare) as pool:
        for name, found in zip(unlike, pool.map(lambda one: run_process(one, 600), unlike.values()), strict=True):
            print(f"prepared {name}: {found.get('error') or round(found['first_update_seconds'], 1)}", flush=True)
    for choice in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        choice.unlink()  # Inductor's choice of a kernel's launch, here timed while others used the device


def run_process(request: Request, limit_seconds: float) -> dict[str, Any]:
    """What a fresh process of `update_probe.py` says, or how it ended."""
    command = [sys.executable, str(Path(__file__).with_name("update_probe.py")), json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"not over after {limit_seconds} s"}
    except (IndexError, ValueError):
        return {"error": f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    if "error" in found:
        found["log"] = done.stderr[-3000:]
    return found


def summarize(row: str, programs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row's figures by program, beside its goals."""
    must, goal = TABLE.get(row, (None, None))
    line: dict[str, Any] = {"row": row, "must": must, "goal": goal, "programs": {}}
    good = {program: [run for run in runs if "error" not in run] for program, runs in programs.items()}
    for program, runs in good.items():
        if not runs:
            line["programs"][program] = {"error": programs[program][-1]["error"]}
            continue
        rates = [run["windows"] for run in runs]
        kernels = by_category(KernelTime.model_validate(kernel) for kernel in runs[0]["kernels"])
        found: dict[str, Any] = {
            "processes": len(runs),
            "targets_per_second": middle(rates),
            "first_update_seconds": [run["first_update_seconds"] for run in runs],
            "memory": runs[-1]["memory"],
            "categories": {name: {"milliseconds": ms, "launches": n} for name, (ms, n) in kernels.items() if n},
        }
        if program != PLAIN and good.get(PLAIN):
            plain = [run["windows"] for run in good[PLAIN]]
            found |= {"ratio": middle(rates) / middle(plain), "ratio_interval": interval(rates, plain)}
        line["programs"][program] = found
    return line


def middle(rates: Sequence[Sequence[float]]) -> float:
    """Of processes' windows."""
    return median(median(windows) for windows in rates)


def interval(ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% of the ratio of the middles, by the bootstrap in two stages (Davison and Hinkley, 1997, section 3.8)."""
    generator = np.random.default_rng(0)

    def draw(rates: Sequence[Sequence[float]]) -> float:
        again = [rates[index] for index in generator.integers(len(rates), size=len(rates))]
        return middle([generator.choice(windows, size=len(windows)).tolist() for windows in again])

    low, high = np.quantile([draw(ours) / draw(plain) for _ in range(DRAWS)], [0.025, 0.975])
    return float(low), float(high)


def told(run: dict[str, Any]) -> str:
    if "error" in run:
        return str(run["error"])
    return f"{median(run['windows']):,.0f} targets/s, first update {run['first_update_seconds']:.1f} s"


def show(line: dict[str, Any]) -> None:
    goals = f" (must {line['must']:,.0f}, goal {line['goal']:,.0f})" if line["must"] else ""
    print(f"\n{line['row']}{goals}")
    good = {program: found for program, found in line["programs"].items() if "error" not in found}
    for program, found in line["programs"].items():
        if program not in good:
            print(f"  {program}: {found['error']}")
            continue
        low, high = found.get("ratio_interval", (1.0, 1.0))
        peak = found["memory"]["peak_allocated_bytes"]
        memory = f", {peak / 2**30:.2f} GiB allocated" if peak else ""
        ratio = f", {found['ratio']:.3f} of plain ({low:.3f} to {high:.3f})" if "ratio" in found else ""
        first = " ".join(f"{seconds:.1f}" for seconds in found["first_update_seconds"])
        print(f"  {program}: {found['targets_per_second']:,.0f} targets/s{ratio}{memory}, first update {first} s")
    for category in dict.fromkeys(name for found in good.values() for name in found["categories"]):
        cells = (found["categories"].get(category) for found in good.values())
        texts = (f"{cell['milliseconds']:8.3f} ms {cell['launches']:7.1f}" if cell else f"{'-':>19}" for cell in cells)
        print(f"    {category:20}" + "  ".join(texts))


if __name__ == "__main__":
    main()
