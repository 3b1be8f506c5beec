"""The loader with its parts timed: subclasses and wrappers that note seconds and change nothing else."""

import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinyllm_ray.data.cache import MANIFEST, Preparation, SplitTotals, TokenCache, new_manifest, open_cache
from tinyllm_ray.data.feed import CudaFeed, HostFeed
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.ranges import FileRanges
from tinyllm_ray.data.shards import ShardWriter

COPIES_BETWEEN_EVENTS = 64


@dataclass
class Notes:
    """What one loader did."""

    gather_seconds: list[float] = field(default_factory=list)
    """A batch's rows into its host buffer (on CUDA pinned, so that this is pinning too)."""
    copy_enqueue_seconds: list[float] = field(default_factory=list)
    copy_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    reads: list[dict[str, Any]] = field(default_factory=list)
    activations: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        copies = [begin.elapsed_time(end) / 1e3 for begin, end in self.copy_events]
        later = [one["seconds"] for one in self.activations if one["prefetched"]]
        return {
            "gather_seconds": summary(self.gather_seconds),
            "pin_seconds": summary(self.gather_seconds) if self.copy_enqueue_seconds else None,
            "copy_enqueue_seconds": summary(self.copy_enqueue_seconds),
            "copy_gpu_seconds": summary(copies),
            "read_seconds": summary([read["seconds"] for read in self.reads]),
            "prefetched_activation_seconds": summary(later),
            "reads": self.reads,
            "activations": self.activations,
        }


def summary(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.array(seconds)
    return {
        "count": len(seconds),
        "total": float(values.sum()),
        "mean": float(values.mean()),
        "median": statistics.median(seconds),
        "p95": float(np.percentile(values, 95)),
        "p99": float(np.percentile(values, 99)),
        "maximum": float(values.max()),
    }


class TimedRanges(FileRanges):
    def __init__(self, cache: TokenCache, notes: Notes) -> None:
        super().__init__(cache)
        self._notes, self._width = notes, cache.dtype.itemsize

    def load(self, split, start, stop):
        began = time.perf_counter()
        tokens = super().load(split, start, stop)
        self._notes.reads.append(
            {
                "split": split,
                "start": start,
                "stop": stop,
                "bytes": (stop - start) * self._width,
                "seconds": time.perf_counter() - began,
                "thread": threading.current_thread().name,
            }
        )
        return tokens


class TimedLoader(RowLoader):
    def __init__(self, cache: TokenCache, notes: Notes, read_ahead: int, **options: Any) -> None:
        self._notes, self._read_ahead = notes, read_ahead
        ranges = TimedRanges(cache, notes)
        super().__init__(cache, read_ahead=read_ahead, ranges=ranges, on_activation=self._note, **options)

    def next_into(self, out):
        began = time.perf_counter()
        super().next_into(out)
        self._notes.gather_seconds.append(time.perf_counter() - began)

    def _note(self, activation):
        notes = self._notes
        notes.activations.append(
            {
                "batch": len(notes.gather_seconds) + 1,
                "group": activation.visit.range.index,
                "cursor": activation.visit.start,
                "prefetched": bool(notes.activations) and self._read_ahead > 0,
                "ready": activation.ready,
                "seconds": activation.seconds,
            }
        )


class TimedCudaFeed(CudaFeed):
    def __init__(self, loader: RowLoader, rows: int, device: torch.device, notes: Notes) -> None:
        self._notes = notes
        super().__init__(loader, rows, device)

    def _copy(self, host):
        notes = self._notes
        sampled = len(notes.copy_enqueue_seconds) % COPIES_BETWEEN_EVENTS == 0
        if sampled:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        began = time.perf_counter()
        batch = super()._copy(host)
        notes.copy_enqueue_seconds.append(time.perf_counter() - began)
        if sampled:
            end.record()
            notes.copy_events.append((begin, end))
        return batch


def timed_feed(cache: TokenCache, rows: int, device: torch.device, notes: Notes, **options: Any):
    loader = TimedLoader(cache, notes, **options)
    return TimedCudaFeed(loader, rows, device, notes) if device.type == "cuda" else HostFeed(loader, rows)


def make_cache(folder: Path, shards: int, shard_tokens: int, vocab_size: int) -> TokenCache:
    """Random tokens in as many full shards, and one token more."""
    writer = ShardWriter(folder, "train", shard_tokens, vocab_size)
    random = np.random.RandomState(0)
    for _ in range(shards):
        writer.append(random.randint(0, vocab_size, shard_tokens).astype(writer.dtype))
    writer.append(np.zeros(1, writer.dtype))
    totals = SplitTotals(tokens=shards * shard_tokens + 1, documents=1, empty_documents=0, text_bytes=0)
    manifest = new_manifest(
        source={"corpus": "made by chance"},
        preparation=Preparation(shuffle_seed=0, shuffle_buffer_documents=0, shard_tokens=shard_tokens),
        tokenizer_fingerprint="0" * 64,
        vocab_size=vocab_size,
        end_of_text=0,
        splits={"train": totals},
        shards=writer.close(),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return open_cache(folder)


def drop_from_page_cache(cache: TokenCache) -> None:
    """Make the next reads cold, as far as this system lets an ordinary user do so."""
    for path in cache.folder.glob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
