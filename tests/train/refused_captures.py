"""Captures that cannot succeed, each to be run by a process of its own: python refused_captures.py CASE.

Ends with an error where the refusal is not as it should be.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from tinyllm_ray.train.cuda_capture import CudaCapture
from tinyllm_ray.train.graph_update import WARM_UP_UPDATES, GraphUpdate
from tinyllm_ray.train.update import Statistics

DEVICE = torch.device("cuda", 0)
REASON = r"execution.update: graph: no capture of this update: .*\(in \w+, "


def refused(run: Callable[[torch.Tensor], Statistics]) -> Exception:
    """What the capture of `run` raises after its warm-up."""
    update = GraphUpdate(run, CudaCapture(DEVICE))
    batch = torch.ones((1, 2), dtype=torch.uint16, device=DEVICE)
    for _ in range(WARM_UP_UPDATES):
        update(batch)
    try:
        update(batch)
    except Exception as error:
        return error
    raise AssertionError("it was captured")


class Reads(torch.autograd.Function):
    """Its backward pass waits for the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * gradient.sum().item()


def host_read(backward: bool = False) -> None:
    """Says what cannot be captured, leaves the device usable, and has done nothing of the update that failed."""
    weight = torch.zeros(4, device=DEVICE)

    def run(batch: torch.Tensor) -> Statistics:
        weight.add_(batch.sum())
        if not backward:
            weight.sum().item()
        x = torch.ones(2, device=DEVICE, requires_grad=True)
        torch.autograd.backward(Reads.apply(x).sum() if backward else x.sum())
        return Statistics(weight.sum(), weight.max())

    stream = torch.cuda.current_stream()
    error = refused(run)
    assert isinstance(error, RuntimeError), repr(error)
    assert re.match(REASON, str(error)), str(error)
    assert torch.cuda.current_stream() == stream
    assert weight.tolist() == [2 * WARM_UP_UPDATES] * 4, weight.tolist()


def out_of_memory() -> None:
    """A capture beyond the memory is told like any other want of it."""
    weight, calls = torch.zeros(4, device=DEVICE), []

    def run(batch: torch.Tensor) -> Statistics:
        calls.append(batch)
        if len(calls) > WARM_UP_UPDATES:
            torch.empty(2**45, device=DEVICE)
        return Statistics(weight.sum(), weight.max())

    error = refused(run)
    assert isinstance(error, torch.OutOfMemoryError), repr(error)


CASES: dict[str, Callable[[], None]] = {
    "host_read": host_read,
    "host_read_in_backward": lambda: host_read(backward=True),
    "out_of_memory": out_of_memory,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
