"""A model of the space: main effects and pairwise interactions of the settings on the logarithm of a figure.

A Bayesian linear model (Gaussian priors on every effect, so a ridge whose strength differs by effect), written as the
Gaussian process it equals (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, 2.2): the covariance of
two executions is the sum over dimensions of the variance of the effect they share, and over pairs of dimensions of
that of the interaction they share. Effects count from the baseline: an execution that equals it in a dimension has
none there, and an interaction needs both of its dimensions changed. Sizes (micro-batch, threads, read-ahead) walk away
from the baseline in steps, so neighbours are alike. Devices and drift have effects of their own, which predictions
leave out. With tens of records this takes milliseconds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyllm_ray.search.earlier import ANOTHER_RECIPE, OWN, Origin, alike
from tinyllm_ray.search.kinds import dimensions, kind_of
from tinyllm_ray.search.priors import Priors, launch_bound

Floats = NDArray[np.float64]

MISFIT_SD = 0.006
"""What effects of three and more settings leave over, for every execution alone."""

PROCESS_SD = 0.004
"""By which the same execution differs from process to process: 1.863 to 1.865 and 1.902 to 1.904 M targets/s (H200)."""

DEVICE_SD = 0.02
"""By which devices of one kind differ: 1.473, 1.496 and 1.539 M targets/s on three GH200 nodes."""

DRIFT_SD = 0.002
"""What ten trials of warming up may do to a device."""

LARGER_KERNELS = 0.03
"""What a doubling of the micro-batch adds to the logarithm of throughput once launches cost nothing (H200: 0.036 and
0.028 from 32 to 64 and 128 rows)."""

LAUNCHES_SD, GRAPHS_SD = 0.15, 0.04
"""By which a halving of the micro-batch differs from what `launch_bound` says, where operators and where graphs launch:
a GH200 loses 0.06, an H200 0.28 from 32 rows to 16, compiled."""

INTERACTION = 0.3
"""A pair's interaction over the geometric mean of the two effects' standard deviations."""


class Observation(NamedTuple):
    """One measured figure."""

    execution: Mapping[str, Any]
    value: float
    """Its logarithm."""
    noise: float
    """Standard deviation of `value`."""
    device: str | None = None
    position: int = 0
    """Trials the device had run before."""
    origin: Origin = OWN
    """Which study measured it; `value` is then as if this study's prior had been its own (`carried`)."""


class EffectPrior(Protocol):
    """What is believed of a figure before any record."""

    @property
    def level_sd(self) -> float:
        """Standard deviation of the baseline's own figure."""
        ...

    def mean(self, execution: Mapping[str, Any]) -> float:
        """Expected logarithm."""
        ...

    def sd(self, dimension: str, value: Any) -> float:
        """Of a level's effect; of a size's, a doubling."""
        ...


@dataclass(frozen=True)
class ThroughputPrior:
    """Of the logarithm of targets a second."""

    priors: Priors
    baseline: Mapping[str, Any]
    parameters: int
    level_sd: float = 1.0

    def mean(self, execution: Mapping[str, Any]) -> float:
        rate = self.priors.work_per_second("compiled") / self.parameters
        return math.log(rate) + self._relative(execution)

    def _relative(self, execution: Mapping[str, Any]) -> float:
        total = 0.0
        for dimension, value in dimensions(execution).items():
            if dimension == "launches":
                continue  # its mean is the micro-batch's
            if dimension == "micro_batch_size":
                rows = self.priors.half_rows(kind_of(execution), self.parameters)
                total += launch_bound(float(value), rows) + LARGER_KERNELS * math.log2(value)
            else:
                total += self.priors.effect((dimension, value))[0]
        return total

    def sd(self, dimension: str, value: Any) -> float:
        if dimension == "launches":
            return GRAPHS_SD if value[0] == "graphs" or self.priors.device_kind == "cpu" else LAUNCHES_SD
        return self.priors.effect((dimension, value))[1]


@dataclass(frozen=True)
class MemoryPrior:
    """Of the logarithm of peak bytes: in proportion to a micro-batch, eager thrice compiled (H200: 23 and 8 GB)."""

    baseline: Mapping[str, Any]
    level_sd: float = 3.0

    def mean(self, execution: Mapping[str, Any]) -> float:
        log: float = math.log(1e10 * execution["micro_batch_size"] / self.baseline["micro_batch_size"])
        log += 1.0 if kind_of(execution) == "eager" else 0.0
        saves = bool(execution["recompute_activations"]) + (execution["loss_kernel"] == "triton")
        return log - 0.3 * float(saves)

    def sd(self, dimension: str, value: Any) -> float:
        return {
            "micro_batch_size": 0.1,
            "launches": 0.05,
            "kind": 0.3,
            "cpu_threads": 0.01,
            "prefetch_depth": 0.01,
        }.get(dimension, 0.15)


@dataclass(frozen=True)
class CompilePrior:
    """Of the logarithm of a first update's seconds, its compilation not cached."""

    priors: Priors
    level_sd: float = 0.4

    def mean(self, execution: Mapping[str, Any]) -> float:
        return math.log(self.priors.first_update_seconds(kind_of(execution))[0])

    def sd(self, dimension: str, value: Any) -> float:
        return {
            "micro_batch_size": 0.05,
            "launches": 0.03,
            "kind": 0.25,
            "cpu_threads": 0.05,
            "prefetch_depth": 0.01,
        }.get(dimension, 0.1)


_SIZES = frozenset({"micro_batch_size", "cpu_threads", "prefetch_depth"})


class EffectModel:
    """What the observations say of every execution. Deterministic; equal inputs give equal bits on one machine."""

    def __init__(self, prior: EffectPrior, baseline: Mapping[str, Any], observations: Sequence[Observation]) -> None:
        self._prior = prior
        self._base = dimensions(baseline)
        self._seen = [dimensions(seen.execution) for seen in observations]
        self._solved: Floats | None = None
        self._variance: dict[tuple[str, Any], tuple[float, float]] = {}
        if not observations:
            return
        noise = np.array([seen.noise for seen in observations])
        origins = [seen.origin for seen in observations]
        covariance = self._covariance(self._seen, self._seen)
        covariance += MISFIT_SD**2 * np.array([[one == other for other in self._seen] for one in self._seen])
        rest = _devices(observations) + np.diag(noise**2 + 1e-10)
        residual = np.array([seen.value - prior.mean(seen.execution) for seen in observations])
        best = -math.inf
        for another, chance in ANOTHER_RECIPE.items():
            lower = np.linalg.cholesky(alike(origins, origins, another) * covariance + rest)
            half = np.linalg.solve(lower, residual)
            likelihood = math.log(chance) - float(half @ half) / 2 - float(np.log(np.diag(lower)).sum())
            if likelihood > best:
                best, self._lower, self._solved = likelihood, lower, np.linalg.solve(lower.T, half)
                self._counts = alike([OWN], origins, another)
            if len(set(origins)) == 1:
                break  # no other study's, so that every number says the same

    def predict(self, executions: Sequence[Mapping[str, Any]]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm, both [executions], on the first device as it was at first."""
        asked = [dimensions(execution) for execution in executions]
        means = np.array([self._prior.mean(execution) for execution in executions])
        variances = self._variances(asked) + MISFIT_SD**2
        if self._solved is not None and asked:
            shared = self._covariance(asked, self._seen)
            places = {_key(seen): [] for seen in self._seen}  # type: dict[tuple[Any, ...], list[int]]
            for index, seen in enumerate(self._seen):
                places[_key(seen)].append(index)
            for index, one in enumerate(asked):
                shared[index, places.get(_key(one), [])] += MISFIT_SD**2
            shared *= self._counts
            means = means + shared @ self._solved
            variances = variances - (np.linalg.solve(self._lower, shared.T) ** 2).sum(axis=0)
        return means, np.sqrt(np.maximum(variances, 1e-12))

    def _covariance(self, ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Floats:
        total = np.full((len(ones), len(others)), self._prior.level_sd**2)
        pairs, squares = np.zeros_like(total), np.zeros_like(total)
        for dimension, base in self._base.items():
            rows, columns = [one[dimension] for one in ones], [other[dimension] for other in others]
            if set(rows) == {base} or set(columns) == {base}:
                continue  # no effect to share
            values = list(dict.fromkeys([*rows, *columns]))
            table = np.array([[self._effect(dimension, one, other) for other in values] for one in values])
            sds = np.sqrt([self._prior.sd(dimension, value) for value in values])
            half = INTERACTION * table / np.outer(sds, sds)
            place = {value: index for index, value in enumerate(values)}
            where = np.ix_([place[value] for value in rows], [place[value] for value in columns])
            total += table[where]
            # The product of two of these is the interaction's covariance.
            scaled = half[where]
            pairs += scaled
            squares += scaled**2
        return total + (pairs**2 - squares) / 2

    def _variances(self, asked: Sequence[Mapping[str, Any]]) -> Floats:
        """The diagonal of `_covariance`, without the rest of it."""
        total = np.full(len(asked), self._prior.level_sd**2)
        pairs, squares = np.zeros_like(total), np.zeros_like(total)
        for dimension, base in self._base.items():
            column = [one[dimension] for one in asked]
            values = list(dict.fromkeys(column))
            if values in ([base], []):
                continue
            own = {value: self._own(dimension, value) for value in values}
            both = np.array([own[value] for value in column])
            total += both[:, 0]
            scaled = both[:, 1]
            pairs += scaled
            squares += scaled**2
        return total + (pairs**2 - squares) / 2

    def _own(self, dimension: str, value: Any) -> tuple[float, float]:
        """Variance of a level's effect, and its part in those of interactions."""
        key = dimension, value
        if key not in self._variance:
            effect = self._effect(dimension, value, value)
            self._variance[key] = effect, INTERACTION * effect / self._prior.sd(dimension, value)
        return self._variance[key]

    def _effect(self, dimension: str, one: Any, other: Any) -> float:
        """Covariance of two levels' effects."""
        base = self._base[dimension]
        if base in (one, other):
            return 0.0
        if dimension == "launches":
            if one[0] != other[0]:
                return 0.0
            shared = _shared_steps("micro_batch_size", one[1], other[1], base[1])
            return self._prior.sd(dimension, one) ** 2 * shared
        if dimension in _SIZES:
            return self._prior.sd(dimension, one) ** 2 * _shared_steps(dimension, one, other, base)
        return self._prior.sd(dimension, one) ** 2 if one == other else 0.0


def _shared_steps(dimension: str, one: int, other: int, base: int) -> float:
    """How far two sizes go the same way from the baseline's."""
    first, second = _steps(dimension, one, base), _steps(dimension, other, base)
    return min(abs(first), abs(second)) if first * second > 0 else 0.0


def _steps(dimension: str, value: int, base: int) -> float:
    return float(value - base) if dimension == "prefetch_depth" else math.log2(value / base)


def _key(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.values())


def _devices(observations: Sequence[Observation]) -> Floats:
    """Covariance that comes from having run on the same device, beside the first one, and at about the same time."""
    first = observations[0].device
    same = np.array([[one.device == other.device for other in observations] for one in observations])
    beside = np.array([seen.device != first for seen in observations])
    at = np.array([seen.position / 10 for seen in observations])
    offset: Floats = same * (DEVICE_SD**2 * np.outer(beside, beside) + DRIFT_SD**2 * np.outer(at, at))
    return offset
