"""Forward and backward of N models in N processes on one device, while one process clips, mixes and steps them all.

The weights and gradients of all models lie in one buffer each, which the processes map: shared memory on a CPU, CUDA
IPC on a GPU (PyTorch's multiprocessing does either). An update crosses twice: rows are there and weights are updated,
then gradients and losses are there. Both sides wait for their own device work before they say so, which needs no event
that a dead process could leave unrecorded; the device idles from the last kernel of one side to the first of the other
(asking eight children and hearing all of them takes 0.4 ms on two busy cores; a GPU's first launches come on top).

What it costs: a GPU without MPS takes turns between processes instead of running their kernels side by side; every
child has a CUDA context (about half a GB) and an allocator of its own, so that N models' activations exist at once; and
importing PyTorch takes each child 3 to 5 s of a core. CPU threads are divided among the children, which changed no bit
of nano's updates (1 and 2 threads).
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.errors import TinyllmRayError
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.model.operations import operations_of
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.records import Memory
from tinyllm_ray.train.determinism import determinism
from tinyllm_ray.train.host_memory import keep_freed_memory
from tinyllm_ray.train.interruption import SIGNALS
from tinyllm_ray.train.packed_backward import pass_backward
from tinyllm_ray.train.packed_shared import Shared, share, views_of
from tinyllm_ray.train.update import build_loss, traced_once

_SECONDS_TO_END = 10.0
"""How long children that are asked to end may take before they are killed."""

_SECONDS_BETWEEN_LOOKS = 1.0
"""A dead child's pipe says so at once, unless a process that it had forked still holds it."""


class ModelProcessError(TinyllmRayError, RuntimeError):
    """A model's process raised, or ended. A RuntimeError, so that memory that ran out is told by its text."""


class Processes:
    """A process a model; gradients are left in the packed weights, which move into memory that all processes map.

    Calls raise ModelProcessError, naming the model, where its process raised or ended; the others are then ended too,
    and so is every later call. Children end with `close`, and with this process however it ends. They take no signal
    that ends a run, so that it ends after the update in flight wherever the signal was sent: this process decides.
    Raises OSError where processes cannot be started, or there is too little shared memory.
    """

    def __init__(self, model: PackedLlama, config: Config) -> None:
        self._model = model
        self._device = model.embedding.weight.device
        self._shared = share(model, config)
        self._gradients = views_of(self._shared.gradients, [weight.shape for weight in model.parameters()])
        self._warm = config.execution.update == "eager"
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[connection.Connection[Any, Any]] = []
        self._ended: ModelProcessError | None = None
        atexit.register(self.close)  # before multiprocessing's own, which would wait for them forever
        try:
            with _signals_blocked():
                for number in range(model.models):
                    self._start(number)
        except BaseException:
            self.close()
            raise

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows dealt to the models [N, R, T + 1] to mean losses [N]."""
        self._shared.rows.copy_(rows)
        for weight, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            weight.grad = gradient
        _synchronize(self._device)
        everyone = range(self._model.models)
        if not self._warm:  # one compiles, and the others find what it left in the compile cache
            self._ask("step", everyone[:1])
            everyone, self._warm = everyone[1:], True
        self._ask("step", everyone)
        return self._shared.losses.clone()

    def add_peaks(self, own: Memory) -> Memory:
        """`own`, this process's peaks, and those of all children so far; on a CPU each counts what they share."""
        every = [own.model_dump(), *self._ask("memory", range(self._model.models))]
        together = {key: [peaks[key] for peaks in every] for key in every[0]}
        sums = {key: None if None in values else sum(values) for key, values in together.items()}
        return Memory.model_validate({**sums, "total_bytes": own.total_bytes})

    def close(self) -> None:
        """End the children; waits until they are gone."""
        atexit.unregister(self.close)
        self._ended = self._ended or ModelProcessError("the models' processes have been ended")
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def _start(self, number: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        own, childs = context.Pipe()
        self._pipes.append(own)
        with childs:
            process = context.Process(target=_serve, args=(childs, self._shared, number), name=f"model {number}")
            process.start()
        self._processes.append(process)

    def _ask(self, request: str, models: Sequence[int]) -> list[Any]:
        """What each of `models` answers; they work side by side."""
        if self._ended is not None:
            raise self._ended
        try:
            for number in models:
                with contextlib.suppress(OSError):  # its end shows below
                    self._pipes[number].send(request)
            waiting, answers = {self._pipes[number]: number for number in models}, {}
            while waiting:
                ready = connection.wait([*waiting], _SECONDS_BETWEEN_LOOKS)
                dead = [pipe for pipe, number in waiting.items() if not self._processes[number].is_alive()]
                for pipe in ready or dead:
                    assert isinstance(pipe, connection.Connection)
                    number = waiting.pop(pipe)
                    answers[number] = self._answer(number)
        except BaseException as error:  # an interruption too: what a child was asked would answer the next question
            self._ended = error if isinstance(error, ModelProcessError) else None
            self.close()
            raise
        return [answers[number] for number in models]

    def _answer(self, number: int) -> Any:
        pipe, process = self._pipes[number], self._processes[number]
        try:
            if not process.is_alive() and not pipe.poll():
                raise EOFError
            answer, reason = pipe.recv()
        except (EOFError, OSError):
            raise ModelProcessError(f"model {number}: {_describe_end(process)}") from None
        if reason is not None:
            raise ModelProcessError(f"model {number}: its process raised {reason}")
        return answer


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """While entered, this thread takes no signal that ends a run, and what it starts begins like that.

    Another thread takes them for the process, or they wait. The tracker of multiprocessing is there before: starting it
    unblocks two of them.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe_end(process: multiprocessing.process.BaseProcess) -> str:
    process.join(_SECONDS_TO_END)
    code = process.exitcode
    if code is None:
        return "its process says nothing any more"
    if code < 0:
        hint = ", as the kernel does where memory runs out" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"
    return f"its process ended with exit status {code}; standard error says why"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _serve(pipe: "connection.Connection[Any, Any]", shared: Shared, number: int) -> None:
    """A child's whole life: answers questions with (answer, None), an error with (None, reason), until none come."""
    for ending in SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with determinism(shared.config):
            child = _Child(shared, number)
            while True:
                pipe.send((child.answer(pipe.recv()), None))
    except (EOFError, BrokenPipeError):
        if shared.weights.device.type == "cpu" and shared.config.execution.update == "eager":
            os._exit(0)  # the interpreter's own end takes a second, which gives back GPU memory and ends compilers
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        with contextlib.suppress(OSError):
            pipe.send((None, f"{type(error).__name__}: {first_line}"))


def _end_with_parent() -> None:
    """In the middle of an update, too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _own_peaks(device: torch.device) -> Memory:
    """As `peak_memory`, but the resident set by Linux's other count: `ru_maxrss` begins at what the parent's was."""
    peaks, status = peak_memory(device), Path("/proc/self/status")
    if device.type == "cuda" or not status.exists():
        return peaks
    (resident,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return peaks.model_copy(update={"used_bytes": int(resident) * 1024})


class _Child:
    """One model in its process."""

    def __init__(self, shared: Shared, number: int) -> None:
        config, device = shared.config, shared.weights.device
        torch.set_num_threads(shared.threads)
        if device.type == "cpu":
            keep_freed_memory()
        with torch.device("meta"):
            model = Llama(config.model, operations_of(config.execution))
        shapes = [torch.Size((config.packing.models, *weight.shape)) for weight in model.parameters()]
        weights = [place[number] for place in views_of(shared.weights, shapes)]
        names = [name for name, _ in model.named_parameters()]
        model.load_state_dict(dict(zip(names, weights, strict=True)), assign=True)
        model.cos, model.sin = shared.cos, shared.sin
        self._gradients = [place[number] for place in views_of(shared.gradients, shapes)]
        for weight, gradient in zip(model.parameters(), self._gradients, strict=True):
            weight.grad = gradient
        self._loss = traced_once(build_loss(model, config, device), config)
        self._config, self._device = config, device
        self._rows, self._found = shared.rows[number], shared.losses[number]

    def answer(self, request: str) -> Any:
        return _own_peaks(self._device).model_dump() if request == "memory" else self._step()

    def _step(self) -> None:
        torch._foreach_zero_(self._gradients)
        with sdpa_backend(self._config.execution.sdpa_backend):
            self._found.copy_(pass_backward(self._loss, self._rows, self._config.micro_batch_size))
        _synchronize(self._device)
