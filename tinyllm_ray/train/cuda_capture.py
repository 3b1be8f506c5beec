"""Work of a CUDA device, recorded in a CUDA graph and replayed (NVIDIA, CUDA programming guide, CUDA graphs)."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tinyllm_ray.train.update import Statistics


class CudaCapture:
    """A CUDA graph with its stream; satisfies `train.graph_update.Capture`.

    Warm-up and capture share one side stream, as PyTorch's notes ask: cuBLAS keeps a workspace for every stream, and
    autograd runs a backward pass on the streams of its forward pass, which a capture must not leave. Replays go to the
    caller's stream, and so are ordered with its copies, its evaluations and the feed's batches, for whose copies that
    stream waits.

    A process whose capture failed had better end: where the driver cannot end it either, PyTorch's allocator takes it
    for under way from then on (in torch's sources `CUDAGraph::capture_end` left before `endAllocateToPool`, which later
    ones mend), and the next `torch.cuda.empty_cache` is an internal error.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], Statistics]) -> Statistics:
        user = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(user)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # PyTorch's optimizers wonder why one that is made for a graph steps without it, as it does here before.
            warnings.filterwarnings("ignore", "This instance was constructed with capturable=True", UserWarning)
            found = work()
        # What was found lies in the side stream's memory. The caller's stream may read it until the side stream is
        # used again: that begins by waiting for the caller's.
        user.wait_stream(self._stream)
        return found

    def capture(self, work: Callable[[], Statistics]) -> Statistics:
        failure: Exception | None = None

        def watched() -> Statistics:
            nonlocal failure
            try:
                return work()
            except Exception as error:
                failure = error  # ending the capture fails as well, and says less
                raise

        try:
            # The outer context restores the stream where the capture cannot be ended. Errors are this thread's alone
            # (thread_local): others, like the one that describes the machine, may ask the driver something meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                return watched()
        except Exception as error:
            reason = failure or error
            if isinstance(reason, torch.OutOfMemoryError):
                raise reason from None
            raise RuntimeError(f"execution.update: graph: no capture of this update: {explain(reason)}") from reason

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


def explain(error: Exception) -> str:
    """What PyTorch said, in one line, and where: CUDA's own message names no operator."""
    said = (str(error).strip().splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}{where}"
