"""Host memory kept off nodes that are a GPU's own memory.

By the system call behind set_mempolicy(2), as libnuma is not everywhere. Standard library only: a node's step calls it
before it starts Ray, and a trial once more, for a Ray that somebody else has started. Tested on recorded layouts of a
GH200; not yet run on one.
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from tinyllm_ray.measure.numa import format_list, host_memory, memory_only, numa_nodes, parse_list

_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of set_mempolicy and get_mempolicy."""
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_MOST_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class MemoryPolicy:
    """The calling thread's memory policy, which its children inherit."""

    def __init__(self) -> None:
        self._calls = _SYSTEM_CALLS.get(platform.machine()) if os.uname().sysname == "Linux" else None
        self._libc = ctypes.CDLL(None, use_errno=True)

    def bound(self) -> bool | None:
        """Whether somebody has set one already; None where the kernel does not say."""
        mode = ctypes.c_int(-1)
        if self._calls is None or self._libc.syscall(self._calls[1], ctypes.byref(mode), None, 0, None, 0):
            return None
        return mode.value != _MPOL_DEFAULT

    def bind(self, nodes: Iterable[int]) -> str | None:
        """Take memory of these nodes only, the nearest first; why not, where the kernel refuses."""
        if self._calls is None:
            return f"not known how on {platform.machine()}"
        mask = (ctypes.c_ulong * (_MOST_NODES // _BITS))()
        for node in nodes:
            mask[node // _BITS] |= 1 << (node % _BITS)
        # The kernel reads one bit less than it is told.
        if self._libc.syscall(self._calls[0], _MPOL_BIND, mask, _MOST_NODES + 1):
            return os.strerror(ctypes.get_errno())
        return None


def bind_host_memory(root: Path = Path("/"), policy: MemoryPolicy | None = None) -> str | None:
    """Keep this thread's memory, and that of what it starts, beside the CPUs; what was done, None where nothing was.

    Nothing is to do on a machine without memory-only nodes, or under a policy of somebody else's (`numactl`).
    """
    nodes = numa_nodes(root)
    if not memory_only(nodes):
        return None
    policy = policy or MemoryPolicy()
    if policy.bound():
        return "left as set before"
    allowed = parse_list(_status_field(root, "Mems_allowed_list"))
    wanted = [node.number for node in host_memory(nodes) if not allowed or node.number in allowed]
    if not wanted:
        return "not bound: no node of the host's memory is allowed"
    refused = policy.bind(wanted)
    return f"not bound: {refused}" if refused else f"nodes {format_list(wanted)}"


def _status_field(root: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""
