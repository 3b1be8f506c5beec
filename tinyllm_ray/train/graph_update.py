"""The whole update as one graph: run as it is at first, then captured once, replayed from there on.

What `run` of an update does on the device (every micro-batch's forward and backward pass, clipping, the guard, mixing,
AdamW) becomes one launch of the host's. A replay executes the same kernels on the same addresses, so that all that
differs between updates lies in tensors that stay where they are: the rows, which are copied into a buffer, and what the
host's part of an update writes (learning rates, mixing matrix). No random number is drawn in an update.

It is the whole-network capture of PyTorch's notes (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs):
gradients are None when the capture begins and when it ends, so that they live in the graph's private pool.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.data.feed import widen
from tinyllm_ray.train.cuda_capture import CudaCapture
from tinyllm_ray.train.update import Statistics

Run = Callable[[torch.Tensor], Statistics]
"""An update's device work on int64 rows [rows, context + 1]."""

WARM_UP_UPDATES = 3
"""Updates before the capture, as `torch.cuda.make_graphed_callables` has them.

The first brings what cannot be captured: Inductor's compilation (the backward pass is compiled when it first runs),
Triton's, whose kernels are also timed at their first launch, cuBLAS's handles and workspaces for the stream and for
either thread, cuDNN's plans, AdamW's moments. The second is the first with all of that in place, which is what is
captured; the third costs an update's time and covers what a library puts off once more.
"""


class Capture(Protocol):
    """How a device's work is recorded and repeated."""

    def warm_up(self, work: Callable[[], Statistics]) -> Statistics:
        """What `work` finds, run as it is to be captured. What it holds may be overwritten by the next call."""

    def capture(self, work: Callable[[], Statistics]) -> Statistics:
        """Record `work` without executing anything of it; the tensors that every replay fills.

        Raises RuntimeError, in one line that says why, where it cannot be recorded.
        """

    def replay(self) -> None:
        """Queue what was recorded, after all that the current stream has been given."""

    def reset(self) -> None:
        """Forget what was recorded and give its memory back."""


class GraphUpdate:
    """Runs updates whose `run` is captured; every call is one update, whichever way it is executed.

    The first `WARM_UP_UPDATES` are updates like any other, on their own rows. The next one captures, which executes
    nothing, and is then the first to be replayed: none is lost and none is made twice.

    Nothing waits for the device but the capture. One stream orders everything: an update's rows are copied into the
    buffer after the replay before has read it, and its statistics out of the graph's memory before the next replay.
    Evaluation and checkpoints in between read weights and moments where they are; their own memory is not the graph's.
    """

    def __init__(self, run: Run, capture: Capture) -> None:
        self._run, self._capture = run, capture
        self._warmed = 0
        self._batch: torch.Tensor | None = None
        """Where the graph reads its rows, in the dtype they come in."""
        self._found: Statistics | None = None
        """Where it leaves what it finds."""

    def __call__(self, batch: torch.Tensor) -> Statistics:
        """One update on rows [rows, context + 1] of the cache's dtype; the statistics are tensors of their own.

        Raises ValueError for rows of another shape or dtype than the first, and what `Capture.capture` raises.
        """
        self._fill(batch)
        if self._warmed < WARM_UP_UPDATES:
            found = self._capture.warm_up(self._work)
            self._warmed += 1
            return _copied(found)
        if self._found is None:
            self._found = self._capture.capture(self._work)
        self._capture.replay()
        return _copied(self._found)

    def close(self) -> None:
        """Give the graph's memory back. No update may follow."""
        self._found = None
        self._capture.reset()

    def _fill(self, batch: torch.Tensor) -> None:
        if self._batch is None:
            self._batch = torch.empty(batch.shape, dtype=batch.dtype, device=batch.device)
        if (batch.shape, batch.dtype) != (self._batch.shape, self._batch.dtype):  # copying would stretch or convert
            raise ValueError(
                f"a batch of {batch.dtype} {tuple(batch.shape)} does not fit an update that was captured for "
                f"{self._batch.dtype} {tuple(self._batch.shape)}"
            )
        self._batch.copy_(batch, non_blocking=True)

    def _work(self) -> Statistics:
        assert self._batch is not None
        return self._run(widen(self._batch))


class DirectUpdate:
    """Runs updates as they are written, in the manner of `GraphUpdate`."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, batch: torch.Tensor) -> Statistics:
        return self._run(widen(batch))

    def close(self) -> None:
        """Nothing to close."""


def build_run(run: Run, config: Config, device: torch.device) -> DirectUpdate | GraphUpdate:
    """`run` executed as the configuration says."""
    return GraphUpdate(run, CudaCapture(device)) if config.execution.update == "graph" else DirectUpdate(run)


def _copied(found: Statistics) -> Statistics:
    """They are read updates later, when their memory holds another's."""
    return Statistics(found.loss.clone(), found.grad_norm.clone())
