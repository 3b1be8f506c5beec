"""What a process of `packed_models.py` does: trains one configuration after the other, alone or beside other processes.

All that touches the device runs in processes of that program's, so that the program itself holds none of its memory.
"""

import contextlib
import gc
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.measure.windows import measure
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.train.mixing import mixing_matrix
from tinyllm_ray.train.packed_optimizer import Mixing, PackedAdamW
from tinyllm_ray.train.packed_processes import Processes
from tinyllm_ray.train.trainer import Trainer

PARTS = ("forward", "backward", "forward_and_backward", "norm_and_clip", "mix", "optimizer")
"""Of an update; the third where other processes make both."""

_STEPS_BETWEEN_LOOKS = 5

_together: Any = None
"""The barrier of the row's processes."""
_measured: Any = None
"""How many of them have all their windows."""


def join(together: Any, measured: Any) -> None:
    """A process's first call: what it shares with those beside it."""
    global _together, _measured
    _together, _measured = together, measured


def compile_only(config: Config) -> float:
    """Seconds of the first update, which leaves its graphs in the compile cache."""
    with _plain_errors(), Trainer(config, None) as trainer:
        begin = time.perf_counter()
        trainer.step()
        trainer.synchronize()
        return time.perf_counter() - begin


def train_all(
    configs: Sequence[Config], protocol: Protocol, cache: str | None, part_updates: int
) -> list[dict[str, Any]]:
    """What each training shows, with the device to itself but for other processes; no parts where `part_updates` is 0.

    A process that fails breaks the barrier, and with it the others of its row.
    """
    found = []
    with _plain_errors():
        for config in configs:
            found.append(_train(config, protocol, cache, part_updates))
            torch.compiler.reset()  # every call looks through what was traced before, which a fresh process has not
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """End the barrier's waiting with any error, and raise one that travels: the compiler's own do not unpickle."""
    try:
        yield
    except threading.BrokenBarrierError:
        raise
    except Exception as error:
        if _together is not None:
            _together.abort()
        traceback.print_exc()
        raise RuntimeError(f"{type(error).__name__}: {str(error).strip()}") from None


def _train(config: Config, protocol: Protocol, cache: str | None, part_updates: int) -> dict[str, Any]:
    begin = time.perf_counter()
    with Trainer(config, open_cache(cache) if cache else None) as trainer:
        start_seconds = time.perf_counter() - begin
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

        def warm(seconds: float) -> None:
            if trainer.device.type == "cuda":  # what compiling took is no need of training's
                torch.cuda.reset_peak_memory_stats(trainer.device)
            _together.wait()

        # One clock for all processes: each window's end is a timestamp on it.
        measurement = measure(trainer, protocol, on_warm=warm, wall_clock=time.monotonic)
        _stay_busy(trainer)
        memory = trainer.peak_memory().model_dump(mode="json") | {"device_used_bytes": _device_used(trainer)}
        _together.wait()
        return {
            "device": devices()[0].name,
            "threads": trainer.threads,
            "start_seconds": start_seconds,
            "first_update_seconds": measurement.first_update_seconds,
            "warmup_seconds": measurement.warmup_seconds,
            "windows": [window.model_dump(mode="json") for window in measurement.windows],
            "memory": memory,
            "parts_seconds": time_parts(trainer, part_updates) if part_updates else None,
        }


def _stay_busy(trainer: Trainer) -> None:
    """Go on until every process has its windows, so that none is measured with fewer beside it; then wait for all."""
    with _measured.get_lock():
        _measured.value += 1
    while _measured.value < _together.parties and not _together.broken:
        for _ in range(_STEPS_BETWEEN_LOOKS):
            trainer.step()
        trainer.synchronize()
    _together.wait()


def _device_used(trainer: Trainer) -> int | None:
    """Bytes in use on the whole device, whoever holds them: drivers do not name processes inside containers."""
    if trainer.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(trainer.device)
    return total - free


def common_rates(timelines: Sequence[Sequence[Any]], slices: int) -> list[float]:
    """Targets/s of all processes together, in equal slices of the time in which all were inside their windows.

    A timeline is a process's windows as JSON, timestamps (their ends) on one clock; a window's targets are taken as
    evenly spread over it. Empty where no time was common.
    """
    begin = max(windows[0]["timestamp"] - windows[0]["seconds"] for windows in timelines)
    length = (min(windows[-1]["timestamp"] for windows in timelines) - begin) / slices
    if length <= 0:
        return []
    rates = []
    for low in (begin + index * length for index in range(slices)):
        targets = 0.0
        for window in (window for windows in timelines for window in windows):
            end = window["timestamp"]
            shared = min(end, low + length) - max(end - window["seconds"], low)
            targets += max(0.0, shared) * window["targets_per_second"]
        rates.append(targets / length)
    return rates


def time_parts(trainer: Trainer, updates: int) -> dict[str, float] | None:
    """Mean seconds of an update's parts over updates in a row, between CUDA events on a GPU, else by the host's clock.

    A part ends where the next begins, so that what the device idles is in one of them. Forward is everything before a
    backward pass (the batch too), norm and clipping everything between the last one and the optimizer's step. Marks are
    set by the optimizer's hooks and around `torch.autograd.backward` and `grad`, by which updates pass backward.
    None where a CUDA graph replays the whole update and passes none of these. One kernel mixes and steps: what mixing
    adds to it is told by itself.
    """
    marks: list[tuple[str, Any]] = []
    clock = _Clock(trainer)

    def marked(function: Callable[..., Any], before: str | None, after: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **settings: Any) -> Any:
            if before is not None:
                marks.append((before, clock.stamp()))
            found = function(*arguments, **settings)
            marks.append((after, clock.stamp()))
            return found

        return timed

    hooks = [
        trainer.optimizer.register_step_pre_hook(lambda *_: marks.append(("norm_and_clip", clock.stamp()))),
        trainer.optimizer.register_step_post_hook(lambda *_: marks.append(("optimizer", clock.stamp()))),
    ]
    elsewhere = marked(Processes.__call__, None, "forward_and_backward")
    with contextlib.ExitStack() as patched:
        for name in ("backward", "grad"):
            timed = marked(getattr(torch.autograd, name), "forward", "backward")
            patched.enter_context(mock.patch.object(torch.autograd, name, timed))
        patched.enter_context(mock.patch.object(Processes, "__call__", elsewhere))
        trainer.step()  # the host gets ahead of the device
        for _ in range(updates):
            marks.append(("between", clock.stamp()))
            trainer.step()
    trainer.synchronize()
    for hook in hooks:
        hook.remove()
    first = next(index for index, (part, _) in enumerate(marks) if part == "between")
    seconds = dict.fromkeys((*PARTS, "between"), 0.0)
    for (_, begin), (part, end) in itertools.pairwise(marks[first:]):
        seconds[part] += clock.between(begin, end) / updates
    if not any(seconds[part] for part in PARTS):
        return None
    seconds["mix"] = _time_mixing(trainer)
    seconds["optimizer"] -= seconds["mix"]
    return {part: seconds[part] for part in PARTS}


class _Clock:
    """Stamps in the device's order of work, without waiting for it."""

    def __init__(self, trainer: Trainer) -> None:
        self._cuda = trainer.device.type == "cuda"

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds; events have to be over."""
        return float(begin.elapsed_time(end) / 1e3 if self._cuda else end - begin)


def _time_mixing(trainer: Trainer, steps: int = 5) -> float:
    """Seconds by which mixing makes an optimizer's step longer; it may not be negative. Ends the training's sense."""
    packing, optimizer = trainer.config.packing, trainer.optimizer
    if not packing.mixed:
        return 0.0
    assert isinstance(optimizer, PackedAdamW)
    assert packing.scheme is not None
    assert packing.topology is not None
    weights = [*trainer.model.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    matrix = torch.from_numpy(mixing_matrix(packing.topology, packing.models, 0)).to(weights[0])
    clock, seconds = _Clock(trainer), []
    for mixing in (None, Mixing(packing.scheme, matrix)):
        optimizer.step(mixing=mixing)
        begin = clock.stamp()
        for _ in range(steps):
            optimizer.step(mixing=mixing)
        end = clock.stamp()
        trainer.synchronize()
        seconds.append(clock.between(begin, end) / steps)
    optimizer.zero_grad()
    return max(0.0, seconds[1] - seconds[0])
