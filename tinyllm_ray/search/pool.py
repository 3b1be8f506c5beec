"""Which executions are worth a thought: all of a small space, the neighbourhood of the best in a large one."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tinyllm_ray.config import identity
from tinyllm_ray.search.fitting import FittedSpace

SMALL_SPACE = 2048
"""Executions that are all considered; their figures are predicted in tens of milliseconds."""

_KIND = ("update", "compile_mode")

Score = Callable[[Sequence[Mapping[str, Any]]], Sequence[float]]
"""Something to climb: larger is better."""


class Pool:
    """The executions of a space, by identity; each is settled once."""

    def __init__(self, space: FittedSpace) -> None:
        self._space = space
        self._known: dict[str, dict[str, Any]] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by values, as a settled execution's keys have one order
        self._neighbours: dict[str, list[str]] = {}
        self._is_small = math.prod(len(values) for values in space.factors.values()) <= SMALL_SPACE
        if self._is_small:
            for execution in space.executions():
                self._know(execution)

    def around(
        self, anchors: Iterable[Mapping[str, Any]], score: Score, host_bound: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, dict[str, Any]]:
        """Executions to choose from, by identity.

        Of a small space all; of a large one whatever differs from an anchor in one factor, and what is met on the
        way up from the first anchor (the best so far), one factor at a time. Thread counts are varied only where
        `host_bound` says that the host's speed shows.
        """
        threads = self._space.baseline["cpu_threads"]

        def counts(name: str) -> bool:
            return self._known[name]["cpu_threads"] == threads or host_bound(self._known[name])

        if self._is_small:
            found = list(self._known)
        else:
            anchors = [dict(anchor) for anchor in anchors]
            found = [name for anchor in anchors for name in self._beside(self._know(anchor))]
            found += self._climb(self._know(anchors[0]), score, counts)
        return {name: self._known[name] for name in found if counts(name)}

    def _climb(self, start: str, score: Score, counts: Callable[[str], bool]) -> list[str]:
        path: list[str] = []
        here = start
        height = score([self._known[here]])[0]
        while True:
            beside = [name for name in self._beside(here) if counts(name)]
            scores = score([self._known[name] for name in beside]) if beside else []
            best = max(range(len(beside)), key=scores.__getitem__, default=None)
            if best is None or scores[best] <= height:
                return [*path, *beside]  # one that lies beside the top may be better than expected
            here, height = beside[best], scores[best]
            path.append(here)

    def _beside(self, name: str) -> list[str]:
        """Executions that differ from one of the known in one factor."""
        if name not in self._neighbours:
            found = dict.fromkeys(self._know(other) for other in self._changes(self._known[name]))
            self._neighbours[name] = [other for other in found if other != name]
        return self._neighbours[name]

    def _changes(self, execution: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        factors = self._space.factors
        for key, values in factors.items():
            if key not in _KIND:
                for value in values:
                    yield self._space.settle({**execution, key: value})
        # The two together: a mode of one update may mean nothing to another.
        for kind in itertools.product(*(factors.get(key, (execution[key],)) for key in _KIND)):
            yield self._space.settle({**execution, **dict(zip(_KIND, kind, strict=True))})

    def _know(self, execution: Mapping[str, Any]) -> str:
        values = tuple(execution.values())
        if values not in self._names:
            self._names[values] = name = identity(execution)
            self._known.setdefault(name, dict(execution))
        return self._names[values]
