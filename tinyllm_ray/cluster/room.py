"""Whether some node of the cluster can hold a trial; without one, Tune would wait for it until the budget is over."""

import time
from collections.abc import Callable, Iterable, Mapping

import ray
from ray.tune import Stopper

from tinyllm_ray.clock import Clock
from tinyllm_ray.cluster.returns import NODES_LOST
from tinyllm_ray.errors import ConfigError

_LOOK_SECONDS = 2.0
_PATIENCE_SECONDS = 15.0
"""A node that rejoins, one that Slurm requeues, is back within seconds or not in this budget."""

Resources = Mapping[str, float]


def alive_nodes() -> list[Resources]:
    """What each node that is alive has altogether, whoever uses it now."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class Room(Stopper):  # type: ignore[misc]
    """Ends Tune's loop once no node could hold a trial for a while; `reason` then says so."""

    def __init__(
        self,
        asked: Resources,
        nodes: Callable[[], Iterable[Resources]] = alive_nodes,
        clock: Clock = time.monotonic,
    ) -> None:
        """`asked` is what every trial takes. Raises ConfigError where no node has that from the start."""
        self.reason: str | None = None
        self._asked = asked
        self._nodes = nodes
        self._clock = clock
        self._looked = self._seen = clock()
        """When the nodes were asked for last, and when one of them could hold a trial."""
        if not self._is_there():
            raise ConfigError(f"{self._words()}; start Ray's nodes with as many, or join another cluster")

    def __call__(self, trial_id: str, result: Mapping[str, object]) -> bool:
        """No single trial is stopped."""
        return False

    def stop_all(self) -> bool:
        now = self._clock()
        if self.reason is None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if self._is_there():
                self._seen = now
            elif now - self._seen >= _PATIENCE_SECONDS:
                self.reason = f"{NODES_LOST}: {self._words()}"
        return self.reason is not None

    def _is_there(self) -> bool:
        return any(all(node.get(name, 0) >= amount for name, amount in self._asked.items()) for node in self._nodes())

    def _words(self) -> str:
        nodes = [_amounts({name: node.get(name, 0) for name in self._asked}) for node in self._nodes()]
        return f"a trial takes {_amounts(self._asked)}, and the nodes alive have {'; '.join(nodes) or 'nothing'}"


def _amounts(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
