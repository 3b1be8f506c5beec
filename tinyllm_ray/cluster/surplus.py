"""Nodes that a study can no longer use, named to the job's launcher, which hands them back to Slurm.

A study asks for as many trials at once as can help right after its first result; from then on what it learns narrows
the search. So once it has nothing more to start, idle nodes go, down to room for the most trials that ever ran at once;
and all idle ones once it verifies its choice, which it does with one trial at a time.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from tinyllm_ray.clock import Clock
from tinyllm_ray.cluster.hand_back import HAND_BACK_VARIABLE

_LOOK_SECONDS = 2.0

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeUse:
    """What one node that is alive has, and what of it is free."""

    address: str
    total: Resources
    free: Resources

    def room(self, asked: Resources) -> int:
        """Trials that fit at once."""
        return int(min(self.total.get(name, 0) // amount for name, amount in asked.items()))

    def is_idle(self, asked: Resources) -> bool:
        return all(self.free.get(name, 0) == self.total.get(name, 0) for name in asked)


def nodes_in_use() -> list[NodeUse]:
    """Every node that is alive."""
    free = ray._private.state.available_resources_per_node()
    return [
        NodeUse(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


class Surplus:
    """Names idle nodes to the launcher; outside of a launcher's job it does nothing."""

    def __init__(
        self,
        asked: Resources,
        own_address: str | None = None,
        nodes: Callable[[], list[NodeUse]] = nodes_in_use,
        environment: Mapping[str, str] = os.environ,
        clock: Clock = time.monotonic,
    ) -> None:
        """`asked` is what every trial takes; the node at `own_address`, the driver's, stays."""
        path = environment.get(HAND_BACK_VARIABLE)
        self._path = Path(path) if path else None
        self._asked, self._own, self._nodes = asked, own_address, nodes
        self._clock, self._looked = clock, -math.inf
        self._peak = 0
        self._named: set[str] = set()

    def started(self, in_flight: int, purpose: str = "search") -> None:
        """So many trials run now; the last one for that purpose."""
        self._peak = 1 if purpose == "verification" else max(self._peak, in_flight)

    def hand_back(self) -> int | None:
        """Name what is idle and not needed; the trials that still fit at once, None where nothing is handed back."""
        if self._path is None or not self._peak or self._clock() - self._looked < _LOOK_SECONDS:
            return None  # Tune asks many times a second
        self._looked = self._clock()
        nodes = [node for node in self._nodes() if node.room(self._asked) and node.address not in self._named]
        kept = [node for node in nodes if node.address == self._own or not node.is_idle(self._asked)]
        idle = [node for node in nodes if node not in kept]
        while idle and sum(node.room(self._asked) for node in kept) < self._peak:
            kept.append(idle.pop(0))
        if not idle:
            return None
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.writelines(f"{node.address}\n" for node in idle)
        except OSError:
            return None  # a folder that is away: the nodes stay
        self._named |= {node.address for node in idle}
        return sum(node.room(self._asked) for node in kept)
