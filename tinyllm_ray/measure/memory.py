"""How much memory a process took: what PyTorch's allocator counted, and what the driver says.

Nothing is worked out from what is free: other processes take of that too.
"""

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pynvml
import torch

from tinyllm_ray.records import Memory

_SHARED_POOL = (0, 0)
"""The id of the pool that everything outside graphs comes from (torch/cuda/memory.py, `memory_snapshot`)."""


def peak_memory(device: torch.device) -> Memory:
    """Peaks of this process on `device` so far; what the driver counts, and the graphs' pools, are those of now."""
    if device.type != "cuda":
        # Linux counts ru_maxrss in KiB, macOS in bytes.
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Memory(used_bytes=used, total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return Memory(
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
        graph_pool_bytes=graph_pool_bytes(torch.cuda.memory_snapshot(), device.index or 0),  # type: ignore[no-untyped-call]
        used_bytes=None if uuid is None else driver_bytes(f"GPU-{uuid}", os.getpid()),
        total_bytes=properties.total_memory,
    )


def graph_pool_bytes(segments: Iterable[Mapping[str, Any]], device: int) -> int | None:
    """Bytes of `device`'s segments in pools of their own; None where the allocator does not say whose a segment is."""
    own = [segment for segment in segments if segment["device"] == device]
    if any("segment_pool_id" not in segment for segment in own):
        return None
    return sum(int(segment["total_size"]) for segment in own if tuple(segment["segment_pool_id"]) != _SHARED_POOL)


def driver_bytes(uuid: str, pid: int) -> int | None:
    """Bytes of the GPU `uuid` that the driver counts for process `pid`, its CUDA context included.

    None where it does not tell: no driver, no permission, or a container whose process ids are not the driver's.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    held: list[int | None] = [process.usedGpuMemory for process in processes if process.pid == pid]
    known = [count for count in held if count is not None]
    return sum(known) if known and len(known) == len(held) else None
