"""How much memory a process took, from the allocator and from the driver."""

import os
import resource
import shutil
import subprocess
import sys

import torch

from tinyllm_ray.records import Memory


def peak_memory(device: torch.device) -> Memory:
    """Peaks of this process on `device` so far."""
    if device.type != "cuda":
        # Linux counts ru_maxrss in KiB, macOS in bytes.
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Memory(used_bytes=used, total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Memory(
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
        used_bytes=_driver_bytes(os.getpid()),
        total_bytes=torch.cuda.get_device_properties(device).total_memory,
    )


def _driver_bytes(pid: int) -> int | None:
    """Device bytes that the driver counts for process `pid`; None where it does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    held = [line.split(",")[1].strip() for line in listing.splitlines() if line.split(",")[0].strip() == str(pid)]
    return sum(int(mebibytes) for mebibytes in held) * 2**20 if held and all(map(str.isdigit, held)) else None
