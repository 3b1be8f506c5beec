"""What the loader costs a training run, part by part, and whether training on real tokens is as fast as without.

    python tests/benchmarks/loader_study.py --out study.json          # on a CUDA device, under four minutes
    python tests/benchmarks/loader_study.py --quick                   # a few seconds on two CPU cores

Builds a cache of random tokens in a temporary folder; prints JSON (into FILE with --out, rewritten after each part)
and a table. Parts:

batches     `next` for 128 and 32 rows of 1,024, device work of 2 ms between calls (`paced`) and none (`drained`)
read_ahead  paced batches with a range read ahead (A) and none (B), in one process in A B B A order
data_wait   the share of the time spent waiting for data at 3 M targets/s, shards out of the page cache and in it
served      a range from the files, from the node's range server that reads it, and from one that holds it
training    real against synthetic tokens, in one process in A B B A order: 20m compiled on CUDA, nano on a CPU
"""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loader_probes import Notes, drop_from_page_cache, make_cache, summary, timed_feed

from tinyllm_ray.config import load
from tinyllm_ray.data.feed import widen
from tinyllm_ray.data.range_server import RangeServer, server_address, supported
from tinyllm_ray.data.ranges import FileRanges
from tinyllm_ray.data.served_ranges import ServedRanges
from tinyllm_ray.train.trainer import Trainer

CONTEXT = 1024
TARGETS_PER_SECOND = 3e6
PACE_SECONDS = 2e-3
# Student's t, two-sided 95%, by degrees of freedom.
T95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10]


class Pace:
    """Device work of a given length after each batch, the host at most one batch ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            cycles, events = 100_000_000, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(1000)
            events[0].record()
            torch.cuda._sleep(cycles)
            events[1].record()
            torch.cuda.synchronize()
            self._cycles_per_second = cycles / (events[0].elapsed_time(events[1]) / 1e3)
            self._done = [torch.cuda.Event(), torch.cuda.Event()]

    def work(self, batch: torch.Tensor, seconds: float) -> None:
        widen(batch)
        if not self._cuda:
            time.sleep(seconds)
        elif seconds:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
            self._done[0].record()
            self._done.reverse()
            self._done[0].synchronize()


def study_batches(
    cache: Any, rows: int, batches: int, pace: Pace, seconds: float, device: torch.device, read_ahead: int = 1
) -> dict[str, Any]:
    """Times `next`; the first batch, which waits for the first range, is kept apart."""
    notes = Notes()
    feed = timed_feed(cache, rows, device, notes, context=CONTEXT, seed=1, shards_per_range=1, read_ahead=read_ahead)
    began = time.perf_counter()
    pace.work(feed.next(), seconds)
    first, waited, times = time.perf_counter() - began, feed.wait_seconds, []
    began = time.perf_counter()
    for _ in range(batches):
        asked = time.perf_counter()
        batch = feed.next()
        times.append(time.perf_counter() - asked)
        pace.work(batch, seconds)
    elapsed, waited = time.perf_counter() - began, feed.wait_seconds - waited
    feed.close()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "rows": rows,
        "read_ahead": read_ahead,
        "work_between_seconds": seconds,
        "first_batch_seconds": first,
        "batch_seconds": summary(times),
        "targets_per_second": batches * rows * CONTEXT / elapsed,
        "data_wait_seconds": waited,
        "data_wait_share": waited / elapsed,
        **notes.as_json(),
    }


def study_served(cache: Any, ranges: int) -> dict[str, Any] | None:
    """Seconds to load a range, by where it comes from."""
    if not supported():
        return None
    address = server_address("loader_study", str(cache.folder))
    server = RangeServer(address)
    shards = cache.shards("train")[:ranges]
    sources = {
        "files": FileRanges(cache),
        "server_reads": ServedRanges(cache, address),
        "server_holds": ServedRanges(cache, address),
    }
    found = {}
    for name, source in sources.items():
        times = []
        for index, shard in enumerate(shards):
            began = time.perf_counter()
            tokens = source.load("train", index * shard.tokens, (index + 1) * shard.tokens)
            times.append(time.perf_counter() - began)
            source.release(tokens)
        found[name] = summary(times)
    reads = server.store.reads
    server.close()
    return {**found, "range_bytes": shards[0].bytes, "ranges": len(shards), "reads_by_server": reads}


def study_training(cache: Any, preset: str, execution: dict[str, Any], blocks: int, updates: int) -> dict[str, Any]:
    """Windows of updates in A B B A blocks, A on real tokens and B on synthetic ones."""
    config = load(preset).with_execution(execution)
    ratios, waits, seconds = [], 0.0, {"real": [], "synthetic": []}
    with Trainer(config, cache) as real, Trainer(config, None) as synthetic:
        for trainer in (real, synthetic) * 2:
            window(trainer, max(1, updates // 4))
        for _ in range(blocks):
            waited = real.data_wait_seconds
            times = [window(trainer, updates) for trainer in (real, synthetic, synthetic, real)]
            waits += real.data_wait_seconds - waited
            seconds["real"] += [times[0], times[3]]
            seconds["synthetic"] += times[1:3]
            ratios.append(math.log((times[1] + times[2]) / (times[0] + times[3])))
        targets = updates * config.training.tokens_per_update
    mean = statistics.fmean(ratios)
    half = T95[len(ratios) - 2] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    low, high = math.exp(mean - half), math.exp(mean + half)
    return {
        "preset": preset,
        "execution": execution,
        "order": "A B B A",
        "blocks": blocks,
        "updates_per_window": updates,
        "targets_per_second": {name: targets / statistics.median(times) for name, times in seconds.items()},
        "window_seconds": seconds,
        "real_over_synthetic": math.exp(mean),
        "real_over_synthetic_95": [low, high],
        "interval_reaches_1": high >= 1,
        "data_wait_share": waits / sum(seconds["real"]),
    }


def window(trainer: Trainer, updates: int) -> float:
    trainer.synchronize()
    began = time.perf_counter()
    for _ in range(updates):
        trainer.step()
    trainer.synchronize()
    return time.perf_counter() - began


def study(folder: Path, quick: bool, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    preset = "20m-32k" if cuda else "nano"
    began = time.perf_counter()
    cache = make_cache(folder, *((4, 2**18) if quick else (8, 2**24)), load(preset).model.vocab_size)
    pace, batches, pace_seconds = Pace(device), 40 if quick else 1500, 1e-4 if quick else PACE_SECONDS
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(sys.argv),
        "shard_tokens": cache.shards("train")[0].tokens,
        "batches": {},
    }
    for rows in (128, 32):
        for name, between in (("paced", pace_seconds), ("drained", 0.0)):
            found["batches"][f"{rows}_{name}"] = study_batches(cache, rows, batches, pace, between, device)
    keep(found)
    found["read_ahead"] = [
        {"arm": arm, **study_batches(cache, 128, batches // 2, pace, pace_seconds, device, read_ahead=int(arm == "A"))}
        for arm in "ABBA"
    ]
    keep(found)
    found["data_wait"] = {}
    for name in ("cold", "warm"):
        if name == "cold":
            drop_from_page_cache(cache)
        between = (1e-3 if quick else 1.0) * 32 * CONTEXT / TARGETS_PER_SECOND
        found["data_wait"][name] = study_batches(cache, 32, batches, pace, between, device)
    keep(found)
    found["served"] = study_served(cache, 4)
    keep(found)
    execution = {"micro_batch_size": 32, "update": "compiled"} if cuda else {}
    blocks, updates = (2, 1) if quick else (10, 60) if cuda else (5, 4)
    found["training"] = study_training(cache, preset, execution, blocks, updates)
    found["seconds"] = time.perf_counter() - began
    return found


def table(found: dict[str, Any]) -> str:
    """The figures that have goals, which are for an H200."""
    batches, training = found["batches"], found["training"]
    activations = batches["128_paced"]["prefetched_activation_seconds"] or {"maximum": math.nan}
    low, high = training["real_over_synthetic_95"]
    rows = [
        ("128 rows a call, mean ms", batches["128_paced"]["batch_seconds"]["mean"] * 1e3, 0.12),
        ("128 rows a call, p99 ms", batches["128_paced"]["batch_seconds"]["p99"] * 1e3, 0.25),
        ("32 rows a call, mean ms", batches["32_paced"]["batch_seconds"]["mean"] * 1e3, 0.06),
        ("longest prefetched activation, ms", activations["maximum"] * 1e3, 0.5),
        ("data-wait at 3 M targets/s, cold, %", found["data_wait"]["cold"]["data_wait_share"] * 100, 0.1),
        ("data-wait at 3 M targets/s, warm, %", found["data_wait"]["warm"]["data_wait_share"] * 100, 0.1),
        ("data-wait in training, %", training["data_wait_share"] * 100, 0.1),
    ]
    lines = [
        f"{name:40} {value:9.4f}   goal < {goal:<5} {'' if value < goal else 'MISSED'}" for name, value, goal in rows
    ]
    lines.append(f"{'real over synthetic':40} {training['real_over_synthetic']:9.4f}   95%: {low:.4f} to {high:.4f}")
    return "\n".join([f"{found['device']}, {found['seconds']:.0f} s", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON; else it is printed")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    options = parser.parse_args()

    def keep(found: dict[str, Any]) -> None:
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        found = study(Path(folder), options.quick, keep)
    keep(found)
    if not options.out:
        print(json.dumps(found))
    print(table(found), file=sys.stderr)


if __name__ == "__main__":
    main()
