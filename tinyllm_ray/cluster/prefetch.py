"""One Ray actor a node that reads token ranges for all of the node's trials, and the address they find it at.

The actor only holds a `RangeServer`: training processes are no Ray processes, ask it over its socket, and do without it
while it is away.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinyllm_ray.data.range_server import RangeServer, server_address, supported

log = logging.getLogger(__name__)

_MOST_RESTARTS = 100
"""Ray starts a dead actor again this often; a server that cannot live costs a process start each time."""


class RangeActor:
    """A node's range server; it has an address and dies with its process, so there is nothing to close."""

    def __init__(self, servers: str) -> None:
        self._server = RangeServer(address_on_this_node(servers)) if supported() else None

    def statistics(self) -> dict[str, int] | None:
        """What the server has done and holds; None on a system without range servers."""
        if self._server is None:
            return None
        store, clients = self._server.store, self._server.clients
        return {"reads": store.reads, "held_bytes": store.held_bytes, "clients": clients, "process": os.getpid()}


def address_on_this_node(servers: str) -> str:
    """Where this node's server among `servers` listens; called in a Ray process."""
    return server_address(servers, ray.get_runtime_context().get_node_id())


def actor_name(servers: str, node: str) -> str:
    """The actor's name in Ray, within the study's namespace."""
    return f"ranges-{servers}-{node}"


@contextmanager
def prefetching(study: str) -> Iterator[str]:
    """While entered, a RangeActor on every node that is alive now; yields the name of these servers together.

    Neither the beginning nor the end waits for them: a trial that is faster reads the files itself, and killing an
    actor is a message. Where this process dies before, Ray ends them as it ends all of its actors.
    """
    servers = f"{study}-{secrets.token_hex(4)}"  # not the address of an earlier session's actor that is still ending
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [_start(servers, node) for node in nodes]
    try:
        yield servers
    finally:
        for actor in actors:
            _end(actor)


def _start(servers: str, node: str) -> Any:
    # Not soft: on another node it would listen where nobody asks.
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=_MOST_RESTARTS)(RangeActor)
    return actor.options(name=actor_name(servers, node), scheduling_strategy=strategy).remote(servers)


def _end(actor: Any) -> None:
    try:
        ray.kill(actor, no_restart=True)
    except Exception as error:  # Ray itself is ending; its actors end with it
        log.warning("a prefetch actor was not told to end: %s", error)
