"""A space settled for one recipe on one machine: what cannot run there is dropped, and every default has its value."""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinyllm_ray.config import Config, identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import (
    CUDA_GRAPH_MODES,
    ExecutionConfig,
    default_micro_batch_size,
    default_packed_backward,
    forbids_determinism,
    needs_gpu,
)
from tinyllm_ray.measure.band import CHECKED_UPDATES
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.search.installed import NEEDED_BY
from tinyllm_ray.search.space import SearchWindows, Space

DeviceKind = Literal["cuda", "cpu"]

MOST_DEFAULT_THREADS_BESIDE_GPU = 8
"""A GPU's host process launches kernels from one thread; more than eight operator threads were never seen to help."""

_NO_GRAPHS = "packed models replay no CUDA graphs"


@dataclass(frozen=True)
class FittedSpace:
    """A space whose every value this recipe and this machine can run."""

    name: str
    device_kind: DeviceKind
    cores: int
    """CPU cores a trial may use."""
    baseline: dict[str, Any]
    """A whole execution, all defaults settled."""
    factors: dict[str, tuple[Any, ...]]
    when: dict[str, dict[str, tuple[Any, ...]]]
    protocol: Protocol
    parameters: int
    """Of the recipe's model; with the next field the size of an update, for predictions."""
    targets_per_update: int
    notes: tuple[str, ...] = ()
    """What was changed to fit, one line each, for people."""
    search_windows: SearchWindows = "by_need"

    @functools.cached_property
    def search_protocol(self) -> Protocol:
        """Of what the search tries beside the baseline; by need, to the last update where losses are compared."""
        if self.search_windows == "by_count" or self.protocol.version == "adaptive":
            return self.protocol
        return self.protocol.by_need(CHECKED_UPDATES[-1])

    def counts(self, key: str, execution: Mapping[str, Any]) -> bool:
        """Whether varying `key` means anything beside the other settings of `execution`."""
        conditions = self.when.get(key, {})
        return all(execution[other] in values and self.counts(other, execution) for other, values in conditions.items())

    def settle(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The whole execution that `settings` name: the baseline's values elsewhere, and where a factor counts not.

        Two executions that run alike come out equal, so `identity` of the result tells candidates apart.
        """
        execution = {**self.baseline, **settings}
        execution |= {key: self.baseline[key] for key in self.when if not self.counts(key, execution)}
        modes = self.factors.get("compile_mode", ())
        if execution["compile_mode"] is None and modes and "default" not in modes:
            # An eager baseline has no mode to pass on; one outside the space's list would not be the user's wish.
            execution["compile_mode"] = modes[0]
        if execution["update"] == "graph" and execution["compile_mode"] in CUDA_GRAPH_MODES:
            # The same kernels without graphs of their own, which the graph of the whole update replaces.
            autotuned = execution["compile_mode"] == "max-autotune"
            execution["compile_mode"] = "max-autotune-no-cudagraphs" if autotuned else "default"
        if execution["update"] == "graph" and execution["packed_backward"] == "processes":
            execution["packed_backward"] = None  # a graph captures the work of one process
        if execution["update"] == "eager":
            execution["compile_mode"] = None
        if any(forbids_determinism(key, value) for key, value in execution.items()):
            execution["deterministic"] = False  # a value of the space, else what forbids it is none
        return _settled(execution)

    def executions(self) -> Iterator[dict[str, Any]]:
        """Every execution of the space once, the baseline first."""
        seen = {identity(self.baseline)}
        yield self.baseline
        for values in itertools.product(*self.factors.values()):
            execution = self.settle(dict(zip(self.factors, values, strict=True)))
            if (name := identity(execution)) not in seen:
                seen.add(name)
                yield execution


def fit_space(
    space: Space, config: Config, device_kind: DeviceKind, cores: int, lacks: Collection[str] = ()
) -> FittedSpace:
    """`space` for the recipe of `config` on a machine that `lacks` some modules (`installed.lacking`).

    Raises ConfigError when nothing is left of it.
    """
    notes: list[str] = []
    baseline = _fit_baseline(space, config, device_kind, cores, notes)
    factors = {}
    dropped: dict[str, list[str]] = {}
    for key, asked in space.factors.items():
        settled = _collapse(key, [_settle_null(key, value, baseline, config) for value in asked], notes)
        fitting = settled
        misfits = _misfits(key, settled, config, device_kind, cores, lacks)
        for values, why in (misfits, _indeterminate(key, settled, baseline, space)):
            if out := [value for value in values if value in fitting]:
                shown = ", ".join("null" if value is None else str(value) for value in out)
                dropped.setdefault(f"{shown} dropped: {why}", []).append(key)
                fitting = [value for value in fitting if value not in out]
        if fitting:
            factors[key] = tuple(fitting)
        elif key == "micro_batch_size":
            # The recipe's doing and not the machine's: going on without the factor would hide the mistake.
            raise ConfigError(
                f"space {space.name}: factors.micro_batch_size: none of {', '.join(map(str, settled))} divides the "
                f"{_rows_of(config)}; write some of {_divisors(config.rows_per_model)}"
            )
    notes += [f"{', '.join(keys)}: {what}" for what, keys in dropped.items()]
    if not factors:
        raise ConfigError(f"space {space.name}: empty space: this machine can run none of it ({'; '.join(notes)})")
    return FittedSpace(
        name=space.name,
        device_kind=device_kind,
        cores=cores,
        baseline=baseline,
        factors=factors,
        when=space.when,
        protocol=space.protocol,
        parameters=config.model.parameters,
        targets_per_update=config.targets_per_update,
        notes=tuple(notes),
        search_windows=space.search_windows,
    )


def _fit_baseline(
    space: Space, config: Config, device_kind: DeviceKind, cores: int, notes: list[str]
) -> dict[str, Any]:
    baseline = space.baseline.model_dump(mode="json")
    rows = config.rows_per_model
    if baseline["micro_batch_size"] is None:
        baseline["micro_batch_size"] = default_micro_batch_size(rows)
    elif rows % baseline["micro_batch_size"]:
        raise ConfigError(
            f"space {space.name}: baseline.micro_batch_size: {baseline['micro_batch_size']} does not divide the "
            f"{_rows_of(config)}; write one of {_divisors(rows)}, or null"
        )
    if baseline["cpu_threads"] is None:
        baseline["cpu_threads"] = min(cores, MOST_DEFAULT_THREADS_BESIDE_GPU) if device_kind == "cuda" else cores
    elif baseline["cpu_threads"] > cores:
        notes.append(f"baseline: {cores} CPU threads instead of {baseline['cpu_threads']}: {_cores_available(cores)}")
        baseline["cpu_threads"] = cores
    if device_kind == "cpu":
        if baseline["update"] != "eager":
            notes.append(f"baseline: eager instead of {baseline['update']}: what a user without a GPU starts with")
            baseline["update"] = "eager"
        for key in [key for key, value in baseline.items() if needs_gpu(key, value)]:
            default = ExecutionConfig.model_fields[key].default
            notes.append(f"baseline: {key} {default} instead of {baseline[key]}: that one needs a GPU")
            baseline[key] = default
    if config.packing.models > 1 and baseline["compile_mode"] in CUDA_GRAPH_MODES:
        notes.append(f"baseline: compile mode default instead of {baseline['compile_mode']}: {_NO_GRAPHS}")
        baseline["compile_mode"] = "default"
    return _settled(baseline)


def _settled(execution: Mapping[str, Any]) -> dict[str, Any]:
    """A whole execution as ExecutionConfig has it, `packed_backward` null where that is what it comes to anyway."""
    settled = ExecutionConfig.model_validate(execution).model_dump(mode="json")
    if settled["packed_backward"] == default_packed_backward(settled["micro_batch_size"]):
        settled["packed_backward"] = None
    return settled


def _settle_null(key: str, value: Any, baseline: Mapping[str, Any], config: Config) -> Any:
    """What null stands for in a list of values."""
    if value is not None:
        return value
    defaults = {
        "micro_batch_size": default_micro_batch_size(config.rows_per_model),
        "cpu_threads": baseline["cpu_threads"],
        "compile_mode": "default",
        "packed_backward": None,
    }
    return defaults[key]


def _collapse(key: str, values: list[Any], notes: list[str]) -> list[Any]:
    unique = [value for index, value in enumerate(values) if value not in values[:index]]
    if len(unique) < len(values):
        twice = [str(value) for value in unique if values.count(value) > 1]
        notes.append(f"{key}: null stands for {', '.join(twice)} here, tried once")
    return unique


def _misfits(
    key: str, values: list[Any], config: Config, device_kind: DeviceKind, cores: int, lacks: Collection[str]
) -> tuple[list[Any], str]:
    """The values that cannot run, and why."""
    packed = config.packing.models > 1
    if key == "micro_batch_size":
        misfits = [value for value in values if config.rows_per_model % value]
        return misfits, f"{'they do' if len(misfits) > 1 else 'it does'} not divide the {_rows_of(config)}"
    if key == "compile_mode" and packed:
        return [value for value in values if value in CUDA_GRAPH_MODES], _NO_GRAPHS
    if key == "optimizer_kernel" and packed:
        return [value for value in values if value == "triton"], "packed models have a kernel of their own"
    if key == "packed_backward" and not packed:
        return values, "the recipe has one model"
    if key == "cpu_threads":
        return [value for value in values if value > cores], _cores_available(cores)
    if device_kind == "cpu":
        misfits = [value for value in values if needs_gpu(key, value)]
        return misfits, f"{'they need' if len(misfits) > 1 else 'it needs'} a GPU"
    needed = {value: NEEDED_BY.get((key, value)) for value in values}
    missing = list(dict.fromkeys(module for module in needed.values() if module in lacks))
    return [value for value in values if needed[value] in lacks], f"{', '.join(map(str, missing))} is not installed"


def _indeterminate(key: str, values: list[Any], baseline: Mapping[str, Any], space: Space) -> tuple[list[Any], str]:
    """The values that cannot promise equal bits, where the baseline does and the space leaves no choice; and why."""
    asked = baseline["deterministic"] and False not in space.factors.get("deterministic", ())
    return [value for value in values if asked and forbids_determinism(key, value)], "deterministic forbids it"


def _rows_of(config: Config) -> str:
    return f"{config.rows_per_model} rows of {config.what_has_rows}"


def _cores_available(cores: int) -> str:
    return f"{cores} CPU core{'s are' if cores > 1 else ' is'} available"


def _divisors(rows: int) -> str:
    return ", ".join(str(size) for size in range(1, rows + 1) if rows % size == 0)
