"""Lends Ray's map to the preparation of token caches: batches go to the cluster's cores, results come back in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from tinyllm_ray.cluster.connect import connect
from tinyllm_ray.data.pool import BATCHES_A_WORKER, BYTES_IN_FLIGHT

B = TypeVar("B", bound=Iterable[Sized])
R = TypeVar("R")


@contextmanager
def ray_map(address: str | None) -> Iterator[Callable[[Callable[[B], R], Iterable[B]], Iterator[R]]]:
    """`map` over the cores of the cluster at `address`, or of a local one that ends with the block."""
    with connect(address):
        yield map_on_ray


def map_on_ray(function: Callable[[B], R], batches: Iterable[B]) -> Iterator[R]:
    """`map(function, batches)` on the cluster this process is connected to. Raises what `function` raised."""
    task = ray.remote(num_cpus=1, max_retries=3)(_run)
    shared = ray.put(function)  # a tokenizer goes to a node once, not with every batch
    limit = BATCHES_A_WORKER * max(1, int(ray.cluster_resources().get("CPU", 1)))
    pending: deque[tuple[int, Any]] = deque()
    in_flight = 0
    try:
        for batch in batches:
            size = sum(map(len, batch))
            while pending and (len(pending) >= limit or in_flight + size > BYTES_IN_FLIGHT):
                done, result = pending.popleft()
                in_flight -= done
                yield _get(result)
            pending.append((size, task.remote(shared, batch)))
            in_flight += size
        while pending:
            yield _get(pending.popleft()[1])
    finally:
        for _, result in pending:
            ray.cancel(result)


def _run(function: Callable[[Any], Any], batch: Any) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
    return function(batch)


def _get(result: Any) -> Any:
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        # Ray's own carries the worker's traceback as its message.
        raise error.cause from None
