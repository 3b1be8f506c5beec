"""Which kernels an update really ran: every one of them, by name and by kind, with its time and its launches.

On a GPU the device's own events are read (CUPTI's, through `torch.profiler`), so that kernels inside replayed CUDA
graphs and compiled code show like any others. A CPU has no kernels; the honest equivalent are PyTorch's operators with
the time spent in themselves. Code that Inductor compiled for a CPU is one entry (`## Call CompiledFxGraph ...`) for all
that it fused; the operators that it calls, matrix products and flash attention, show as in eager code.
"""

import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch.profiler import ProfilerActivity, profile

from tinyllm_ray.clock import Clock
from tinyllm_ray.measure.kernel_names import Backend, attention_backend_of, categorize
from tinyllm_ray.records import KernelCategory, KernelTime

Source = Literal["device", "operators"]

_OPERATOR = re.compile(r"(?:aten|mkl|mkldnn|inductor)::|## Call CompiledFxGraph ")
_BATCHED_PRODUCTS = {"aten::bmm", "aten::baddbmm"}


class Event(Protocol):
    """What is read of `torch.autograd.profiler_util.FunctionEvent`."""

    name: str
    is_user_annotation: bool | None

    @property
    def device_type(self) -> "DeviceType": ...

    @property
    def time_range(self) -> "Interval": ...

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds, without those of the operators called."""


class DeviceType(Protocol):
    @property
    def name(self) -> str:
        """`CPU` or `CUDA`."""


class Interval(Protocol):
    def elapsed_us(self) -> float: ...


@dataclass(frozen=True)
class KernelProfile:
    """All kernels of the profiled updates; times and launches are those of one update, on average."""

    source: Source
    updates: int
    kernels: list[KernelTime]
    """The longest first."""
    seconds: float
    """What recording took, the updates themselves included."""


def record_kernels(
    step: Callable[[], object],
    synchronize: Callable[[], None],
    device: torch.device,
    updates: int = 3,
    limit_seconds: float = 1.0,
    clock: Clock = time.perf_counter,
) -> KernelProfile:
    """Run and profile at least one update and at most `updates`, as many as are expected to fit into `limit_seconds`.

    Reading the profiler's events is what costs: about 45 microseconds each on one core, and an eager update with
    many micro-batches has tens of thousands. So one update is profiled first, and its cost says how many more fit.

    Call it when times and peak memory have been read: CUPTI keeps buffers on the device and stays attached. Kernels of
    several streams may overlap, so that their sum can exceed the update's time.
    """
    source: Source = "device" if device.type == "cuda" else "operators"
    begin = clock()
    totals = _Totals()
    # The first session of a process also starts CUPTI, once; the others cost what follows it.
    first_began = _profile(step, synchronize, source, 1, totals, clock)
    each = clock() - first_began
    more = min(updates - 1, int((limit_seconds - (clock() - begin)) / max(each, 1e-9)))
    if more > 0:
        _profile(step, synchronize, source, more, totals, clock)
    profiled = 1 + max(more, 0)
    return KernelProfile(source, profiled, totals.an_update(profiled), clock() - begin)


def _profile(
    step: Callable[[], object],
    synchronize: Callable[[], None],
    source: Source,
    updates: int,
    totals: "_Totals",
    clock: Clock,
) -> float:
    """Add what `updates` updates ran to `totals`; when the first of them began."""
    synchronize()  # what was queued before is no part of these updates
    activity = ProfilerActivity.CUDA if source == "device" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        begin = clock()
        for _ in range(updates):
            step()
        synchronize()
    with _no_collector():
        totals.add(profiler.events(), source)
    return begin


@contextmanager
def _no_collector() -> Iterator[None]:
    """Tens of thousands of events that all stay alive keep the collector busy: more than a third of the reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Totals:
    """Microseconds and launches by name."""

    def __init__(self) -> None:
        self._microseconds: defaultdict[str, float] = defaultdict(float)
        self._launches: defaultdict[str, int] = defaultdict(int)

    def add(self, events: Iterable[Event], source: Source) -> None:
        for event in events:
            # Ranges like `Optimizer.step` also appear among the device's events, over the kernels inside them.
            if event.is_user_annotation:
                continue
            on_cpu = event.device_type.name == "CPU"
            if source == "device" and not on_cpu:
                self._microseconds[event.name] += event.time_range.elapsed_us()
            elif source == "operators" and on_cpu and _OPERATOR.match(event.name):
                self._microseconds[event.name] += event.self_cpu_time_total
            else:
                continue
            self._launches[event.name] += 1

    def an_update(self, updates: int) -> list[KernelTime]:
        kernels = [
            KernelTime(
                name=name,
                category=categorize(name),
                milliseconds=microseconds / 1000 / updates,
                launches=self._launches[name] / updates,
            )
            for name, microseconds in self._microseconds.items()
        ]
        return sorted(kernels, key=lambda kernel: (-kernel.milliseconds, kernel.name))


def by_category(kernels: Iterable[KernelTime]) -> dict[KernelCategory, tuple[float, float]]:
    """Milliseconds and launches an update of every category, those without a kernel included."""
    sums: dict[KernelCategory, tuple[float, float]] = dict.fromkeys(get_args(KernelCategory), (0.0, 0.0))
    for kernel in kernels:
        milliseconds, launches = sums[kernel.category]
        sums[kernel.category] = (milliseconds + kernel.milliseconds, launches + kernel.launches)
    return sums


def attention_backend(kernels: Iterable[KernelTime]) -> set[Backend]:
    """The SDPA backends whose kernels are among `kernels`; more than one if several ran.

    Math is known by the softmax of its scores. Compiled for a CPU that softmax is inside fused code and has no name;
    what still shows are batched matrix products, which the decoder has nowhere else, so that they count as math where
    no other attention was seen.
    """
    names = {kernel.name for kernel in kernels}
    seen = {backend for backend in map(attention_backend_of, names) if backend is not None}
    return seen or ({"math"} if names & _BATCHED_PRODUCTS else set())


def match(requested: str, kernels: Sequence[KernelTime]) -> str | None:
    """Why `kernels` are not what `execution.sdpa_backend` asked for, in one line; None where they are.

    `auto` takes whatever ran, but not nothing: attention that left no trace is not proved.
    """
    seen = attention_backend(kernels)
    if not seen:
        return f"sdpa_backend {requested}: no attention among {len(kernels)} recorded kernels"
    if requested == "auto" or seen == {requested}:
        return None
    strange = sorted(seen - {requested})
    shown = next(
        (kernel.name for kernel in kernels if attention_backend_of(kernel.name) in strange), "batched products"
    )
    beside = f" beside {requested}" if requested in seen else ""
    return f"sdpa_backend {requested}: {' and '.join(strange)} ran{beside}: {shown[:80]}"
