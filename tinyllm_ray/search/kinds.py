"""What an execution is to a model of the space: its kind, and a value in each dimension."""

import functools
from collections.abc import Mapping
from typing import Any, Final

from tinyllm_ray.execution import CUDA_GRAPH_MODES, HOST_KEYS

_REMEMBERED: Final = 4096
"""Executions: a study asks the same of each hundreds of times."""


def kind_of(execution: Mapping[str, Any]) -> str:
    """eager, the compile mode, or graph (with the mode where it is not the default one)."""
    mode = execution["compile_mode"]
    if execution["update"] != "graph":
        return str(mode or execution["update"])
    return "graph" if mode == "default" else f"graph {mode}"


def replays_graphs(execution: Mapping[str, Any]) -> bool:
    """Whether the device gets its kernels from CUDA graphs, so that the host hardly matters."""
    return execution["update"] == "graph" or execution["compile_mode"] in CUDA_GRAPH_MODES


def dimensions(execution: Mapping[str, Any]) -> Mapping[str, Any]:
    """The execution's value in every dimension; update and compile mode make two: the kind, and how it launches.

    The latter goes with the micro-batch: kinds that launch alike share what sizes do to them.
    """
    return _dimensions(tuple(execution.items()))


@functools.lru_cache(_REMEMBERED)
def _dimensions(items: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    execution = dict(items)
    launches = "graphs" if replays_graphs(execution) else execution["update"]
    rest = {key: value for key, value in execution.items() if key not in {"update", "compile_mode"}}
    return {"kind": kind_of(execution), "launches": (launches, execution["micro_batch_size"]), **rest}


def compilation(execution: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What candidates that share compiled code have in common."""
    return _compilation(tuple(execution.items()))


@functools.lru_cache(_REMEMBERED)
def _compilation(items: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((key, value) for key, value in items if key not in HOST_KEYS))
