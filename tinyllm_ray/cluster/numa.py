"""Where a trial's processes run on its node: cores near its GPU, and memory beside the CPU.

As many cores as Ray gave, of the GPU's NUMA node as far as the job has them, and none that another trial has. A machine
with one NUMA node is left as it is. What is set here is inherited by every process that the trial starts. Tested on
recorded layouts; not yet seen on a GH200.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster.numa_claims import Claims
from tinyllm_ray.cluster.numa_memory import MemoryPolicy, bind_host_memory
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.gpu_sensors import find_nvml
from tinyllm_ray.measure.numa import bus_address, cpus_near, format_list, gpu_addresses, numa_nodes


@dataclass(frozen=True)
class Placement:
    """Where one trial's processes run."""

    gpu: str | None
    """PCI address."""
    cores: str | None
    """None where they were left as they are."""
    far_cores: str
    """Those of them that are not near the GPU."""
    memory: str | None
    """What was done about host memory."""


class Seat:
    """A trial's place on its node, taken once for all candidates of its process."""

    def __init__(
        self,
        cores: int,
        gpu: str | None,
        root: Path = Path("/"),
        claims: Claims | None = None,
        allowed: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
        move: Callable[[set[int]], None] = lambda cores: os.sched_setaffinity(0, cores),
        policy: MemoryPolicy | None = None,
    ) -> None:
        """Bind this thread for a trial of so many cores on the GPU at a PCI address; `gpu` None leaves all as it is."""
        self._root, self._claims = root, claims
        self._seen: set[str] = set()
        self.placement = Placement(gpu, None, "", None)
        if gpu is None:
            return
        with contextlib.suppress(OSError, ConfigError):  # placement makes figures better; none is not worth a trial
            self._claims = claims or Claims()
        if self._claims is not None:
            self._claims.take_gpu(gpu)
        chosen, far = self._choose(cores, gpu, sorted(allowed()))
        if chosen:
            try:
                move(set(chosen))
            except OSError:  # a control group that shrank meanwhile
                chosen, far = [], []
        memory = bind_host_memory(root, policy)
        self.placement = Placement(gpu, format_list(chosen) or None, format_list(far), memory)

    def look_around(self) -> None:
        """A candidate begins: from here on its neighbours count."""
        self._seen = set(self.neighbours())

    def as_json(self) -> dict[str, Any]:
        """For the candidate's record: where it ran, and beside whom at its beginning or end."""
        around = sorted(self._seen.union(self.neighbours()))
        return {**asdict(self.placement), "neighbours": around, "load_average": os.getloadavg()[0]}

    def neighbours(self) -> list[str]:
        """PCI addresses of the node's other GPUs that trials of this user are on right now."""
        others = [address for address in gpu_addresses(self._root) if address != self.placement.gpu]
        if self._claims is None or self.placement.gpu is None:
            return []
        return [address for address in others if self._claims.holder(address) is not None]

    def _choose(self, count: int, gpu: str, allowed: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cores to move to, and those among them that are far; none where there is nothing to choose."""
        places = [node.cpus.intersection(allowed) for node in numa_nodes(self._root)]
        near = cpus_near(gpu, self._root).intersection(allowed)
        if self._claims is None or sum(map(bool, places)) < 2 or not near or len(allowed) <= count:
            return [], []
        first = sorted(near)
        chosen = self._claims.take_cores(first, count)
        rest = [core for core in allowed if core not in near]
        chosen += self._claims.take_cores(rest, count - len(chosen))
        # More trials than cores, which is not ours to solve: shared ones, near first.
        chosen += [core for core in first + rest if core not in chosen][: count - len(chosen)]
        return chosen, [core for core in chosen if core not in near]


def trial_gpu(environment: Mapping[str, str] = os.environ, nvml: Any = None) -> str | None:
    """PCI address of the first GPU in CUDA_VISIBLE_DEVICES; None without one, or where NVML does not tell."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if not visible:
        return None
    nvml = nvml or find_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        by_index = visible.isdecimal()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_index else nvml.nvmlDeviceGetHandleByUUID(visible)
        found = nvml.nvmlDeviceGetPciInfo(handle).busId
    except nvml.NVMLError:
        return None
    return bus_address(found.decode() if isinstance(found, bytes) else found)
