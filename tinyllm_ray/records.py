"""What a trial leaves: one TrialRecord, one line of `trials.jsonl`.

A trial's fate is data, never an exception, and a figure is either measured or None. Times of a trial are seconds;
`timestamp` fields are Unix time and only say when something was seen.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tinyllm_ray import journal
from tinyllm_ray.errors import TinyllmRayError
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.validation import explain

SCHEMA_VERSION: Final = 1


class Fate(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    DOMINATED = "dominated"
    """Stopped early because it cannot win."""
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    """Cut by its own limit or by the budget."""
    INVALID = "invalid"
    """Ran, but not what was asked: wrong kernels, wrong numbers."""
    FAILED = "failed"
    """Raised, or its process died by itself."""
    LOST = "lost"
    """Its node or Ray process went away."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class GpuState(_Record):
    """What a GPU's sensors said at a window's end; None, here and in each field, where there is none that tells."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_watts: float | None = None
    """The driver's average, over about a second on recent devices."""
    temperature_celsius: int | None = None
    throttle_reasons: list[str] | None = None
    """Why the clocks are where they are, in NVML's words, like sw_power_cap; empty where nothing holds them."""
    energy_joules: float | None = None
    """What the device took during the window, idle parts of the chip and other processes included."""

    @property
    def throttled(self) -> bool | None:
        """Whether power or heat held the clocks down."""
        if self.throttle_reasons is None:
            return None
        return not THROTTLING.isdisjoint(self.throttle_reasons)


THROTTLING: Final = frozenset(
    {
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    }
)
"""Reasons that cost throughput beside what was asked for; an idle device or clocks set by hand are none of them."""


class Window(_Record):
    """One timed run of consecutive updates, between two waits for the device."""

    index: int
    updates: int
    targets: int
    seconds: float
    targets_per_second: float
    data_wait_seconds: float
    """Part of `seconds` that the host spent waiting for the loader."""
    loss: float | None
    """Mean loss of the last update, in nats a target; None if not finite."""
    grad_norm: float | None
    """Global gradient norm of the last update before clipping; None if not finite."""
    timestamp: float
    gpu: GpuState | None = None
    """None on a CPU, and where nothing reads the device's sensors."""


class Seconds(_Record):
    """Where a trial's time went; None for a stage it did not reach."""

    start: float | None = None
    """From the fork to the first update's start: device, model, optimizer, loader."""
    compile: float | None = None
    """The first update, which includes compilation."""
    warmup: float | None = None
    """The other warm-up updates."""
    windows: float | None = None
    proof: float | None = None
    """After the windows: recording the kernels of a few updates, and parity where it was asked for."""
    total: float | None = None
    """From the request to the record."""


class Memory(_Record):
    """Peak bytes; on a CPU only `used_bytes` (resident set) and `total_bytes`. None, never 0, is what is unknown."""

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    """By the allocator, the pools of graphs included."""
    graph_pool_bytes: int | None = None
    """Reserved for CUDA graphs alone, in pools of their own."""
    used_bytes: int | None = None
    """What the driver says the process holds, the CUDA context included."""
    total_bytes: int | None = None


class Device(_Record):
    """One device a trial ran on."""

    kind: Literal["cuda", "cpu"]
    name: str
    identifier: str | None = None
    """The GPU's UUID."""
    host: str
    total_memory_bytes: int | None = None


KernelCategory = Literal[
    "attention_forward",
    "attention_backward",
    "matmul",
    "loss",
    "norm",
    "rotary",
    "activation",
    "optimizer",
    "copy",
    "other",
]


class KernelTime(_Record):
    """What one kernel costs an update, as the mean over the profiled updates."""

    name: str
    category: KernelCategory
    milliseconds: float
    launches: float


class Parity(_Record):
    """Loss and gradients of one update beside those of the reference execution, on equal weights and tokens."""

    updates: int
    """Updates the weights had had; 0 for fresh ones."""
    targets: int
    loss: float | None
    """In nats a target; None, here and below, if not finite."""
    reference_loss: float | None
    relative_loss_error: float | None
    relative_gradient_error: float | None
    """Norm of the gradients' difference over the norm of the reference's, over all weights."""
    worst_weight: str | None = None
    """The weight whose own gradient differs most by the same measure."""
    worst_weight_error: float | None = None


class TrajectoryPoint(_Record):
    """What one update of a run said."""

    update: int
    """Its number, counted from 1."""
    loss: float | None
    """None if not finite; so is the norm."""
    grad_norm: float | None


class Proof(_Record):
    """The evidence that what was asked is what ran, and that it computed what it should."""

    kernel_source: Literal["device", "operators"] | None = None
    """device: every kernel of the device; operators: PyTorch's operators, on a CPU, which has no kernels to record."""
    profiled_updates: int | None = None
    attention_asked: str | None = None
    attention_seen: list[str] = []
    """SDPA backends whose kernels ran."""
    parity: Parity | None = None
    trajectory: list[TrajectoryPoint] = []
    """At the updates that every candidate is checked at, as far as its protocol went."""


Purpose = Literal["search", "control", "verification", "repeat"]
"""search: to find out how fast a candidate is; control: how fast its device is; verification: the final verdict;
repeat: a candidate that has a figure once more, as somebody asked for, which replaces nothing."""


class TrialRecord(_Record):
    """The whole truth about one trial."""

    schema_version: Literal[1] = SCHEMA_VERSION
    study: str
    candidate: str
    kind: Literal["measurement", "training"]
    purpose: Purpose = "search"
    """What a measurement was made for."""
    round: int | None = None
    """Of a verification: the round it belongs to, counted from 0."""
    fate: Fate
    reason: str | None = None
    """Why the fate is what it is, for people; None where complete."""
    recipe_identity: str
    execution_identity: str
    cache_identity: str | None
    """None where the data is synthetic."""
    source_identity: str
    source_dirty: bool | None
    """Whether the checkout had changes; None outside a checkout."""
    execution: dict[str, Any]
    """The execution section, all defaults settled."""
    protocol: Protocol | None = None
    devices: list[Device] = []
    seconds: Seconds = Seconds()
    start_stage_seconds: dict[str, float] = {}
    """What `seconds.start` is made of: fork, runtime (to the device's first finished operation), model, loader."""
    windows: list[Window] = []
    first_update_seconds: float | None = None
    warmup_seconds: float | None = None
    """All warm-up updates, the first included."""
    seconds_per_update: float | None = None
    targets_per_second: float | None = None
    """Median over the windows."""
    memory: Memory = Memory()
    kernels: list[KernelTime] | None = None
    """All kernels of an update, the longest first; None where they were not recorded."""
    proof: Proof | None = None
    environment: dict[str, Any] = {}
    compile_cache: str | None = None
    configuration: str | None = None
    """Path of the candidate's whole configuration, relative to the study's folder."""
    timestamp: float
    """When the trial began."""

    @property
    def spread(self) -> float | None:
        """Half the range of the windows' throughputs, relative to their median."""
        rates = [window.targets_per_second for window in self.windows]
        if self.targets_per_second is None or len(rates) < 2:
            return None
        return (max(rates) - min(rates)) / 2 / self.targets_per_second

    @property
    def targets_per_joule(self) -> float | None:
        """Over all windows together, by the device's energy counter; None where one of them has no reading."""
        joules = [window.gpu.energy_joules if window.gpu else None for window in self.windows]
        known = [value for value in joules if value is not None]
        if len(known) < len(joules) or sum(known) <= 0:
            return None
        return sum(window.targets for window in self.windows) / sum(known)

    @property
    def throttled_windows(self) -> list[int] | None:
        """Indices of the windows at whose end power or heat held the clocks down; None where no window tells."""
        told = [window for window in self.windows if window.gpu and window.gpu.throttled is not None]
        return [window.index for window in told if window.gpu and window.gpu.throttled] if told else None


def read_records(path: Path) -> list[TrialRecord]:
    """The records of a study, oldest first; a torn last line is left out.

    Raises TinyllmRayError naming a line that holds no record, as one of another version of this package.

    >>> from pathlib import Path
    >>> from tinyllm_ray.records import Fate, read_records
    >>> records = read_records(Path("studies/nano/trials.jsonl"))
    >>> sum(record.fate is Fate.COMPLETE for record in records) > 0
    True
    """
    return parse_records(journal.read_lines(path), path)


def parse_records(entries: Iterable[Mapping[str, Any]], source: Path) -> list[TrialRecord]:
    """The records that the lines of `source` hold. Raises TinyllmRayError naming the first line that holds none."""
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            found.append(TrialRecord.model_validate(entry))
        except ValidationError as error:
            raise TinyllmRayError(explain(error, TrialRecord, f"{source}: line {number}")) from None
    return found
