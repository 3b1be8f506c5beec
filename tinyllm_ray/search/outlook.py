"""What is still to be gained: for every execution in reach the expected saving, what it costs to find out, and more.

The gain is the expected improvement over the best so far (Jones, Schonlau & Welch, Efficient Global Optimization, 1998)
in what the objective counts: seconds of the planned trainings, which depend on the exponential of a normal variable, so
it has the form of an option's price; or the logarithm of throughput. Per second it costs to measure, as Snoek,
Larochelle & Adams (Practical Bayesian Optimization, 2012, 3.2) rank evaluations of unequal length. Trials that still
run count as measured with what was expected of them, so that several workers ask for different things (the kriging
believer of Ginsbourger, Le Riche & Carraro, 2010).
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.cost import CostModel, Prediction
from tinyllm_ray.search.effects import PROCESS_SD, EffectModel, MemoryPrior, Observation, ThroughputPrior
from tinyllm_ray.search.faults import Chances
from tinyllm_ray.search.fitting import FittedSpace
from tinyllm_ray.search.kinds import kind_of, replays_graphs
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.observed import carried_peaks, carried_rates, peaks, rates
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.ruled_out import RAN
from tinyllm_ray.search.verifier import Verifier

Floats = NDArray[np.float64]

FULL_MEMORY = 0.95
"""Share of a device's memory that a trial may be expected to use."""

LEAST_RELATIVE_GAIN = 2e-4
"""Of throughput: where it is the objective, time has no price, and less than this is not worth a measurement."""

FILLED = 0.9
"""Share of an update's time that kernels fill where the host keeps up."""

HOST_BOUND_SHARE = 0.5
"""Micro-batches of this share of the baseline's or less are taken to wait for launches where no kernels are recorded:
20m compiled on an H200 takes 32% longer a target with 16 rows than with 32."""

WITHOUT_ANY = 2.0
"""While nothing has run, gains count from so far below what the baseline was expected to do, as a logarithm."""


@dataclass(frozen=True)
class Prospect:
    """An execution that may be measured."""

    execution: dict[str, Any]
    identity: str
    gain: float
    """Expected, its chance to run considered: seconds of the planned trainings, or logarithm of throughput."""
    prediction: Prediction
    cost: float
    """Expected seconds of measuring it, and of verifying it if it should win."""

    def pays(self, objective: Objective) -> bool:
        """Whether finding out is expected to save more than it costs."""
        return self.gain > (LEAST_RELATIVE_GAIN if objective.kind == "throughput" else self.cost)

    @property
    def gain_per_second(self) -> float:
        return self.gain / self.cost


class Outlook:
    """The models of one moment of a study."""

    def __init__(
        self,
        space: FittedSpace,
        objective: Objective,
        cost: CostModel,
        priors: Priors,
        running: Sequence[Mapping[str, Any]] = (),
        lapsed: Collection[str] = (),
    ) -> None:
        """`lapsed` are executions, by identity, whose records say nothing of whether they run."""
        self.space, self.objective, self.cost = space, objective, cost
        self._records = [record for record in cost.records if record.fate in RAN and rate(record) is not None]
        self._earlier = priors.earlier
        prior = ThroughputPrior(priors, space.baseline, space.parameters)
        observations = [*rates(self._records), *carried_rates(prior)]
        model = EffectModel(prior, space.baseline, observations)
        self._known = model
        if running:
            believed = model.predict(running)[0]
            observations += [
                Observation(execution, float(value), PROCESS_SD)
                for execution, value in zip(running, believed, strict=True)
            ]
            model = EffectModel(prior, space.baseline, observations)
        self._throughput = model
        carried = [record for study in priors.earlier for record in study.verdicts]
        told = [record for record in cost.records if record.execution_identity not in lapsed]
        self._chances = Chances(space.baseline, [*carried, *told])

    @functools.cached_property
    def best(self) -> tuple[float, float, bool]:
        """Of the best complete record as the model sees it, which discounts luck: logarithm of throughput, value of the
        objective, and whether it is the baseline. Pretended figures while there is none."""
        complete = [record for record in self._records if record.fate == Fate.COMPLETE]
        executions = [record.execution for record in complete] or [self.space.baseline]
        logs = self._known.predict(executions)[0] - (0.0 if complete else WITHOUT_ANY)
        values = [self._value(execution, log) for execution, log in zip(executions, logs, strict=True)]
        least = int(np.argmin(values))
        return float(logs[least]), values[least], executions[least] == self.space.baseline

    def expected_rate(self, record: TrialRecord) -> float:
        """Logarithm of a measured throughput as far as the other records make it likely."""
        return float(self._known.predict([record.execution])[0][0])

    def expected_rates(self, executions: Sequence[Mapping[str, Any]]) -> list[float]:
        """Expected logarithm of throughput."""
        return [float(value) for value in self._throughput.predict(executions)[0]]

    def gains_a_second(self, executions: Sequence[Mapping[str, Any]]) -> list[float]:
        """What measuring each is expected to gain over the best, its chance to run considered, per second it takes."""
        self.cost.prepare(executions)
        gains, _ = self._gains(executions, *self._throughput.predict(executions))
        return [
            float(gain) * self._chances(execution) / self._predict(execution).expected_seconds
            for gain, execution in zip(gains, executions, strict=True)
        ]

    def host_bound(self, execution: Mapping[str, Any]) -> bool:
        """Whether the host's speed shows in the execution's, by the kernels recorded of its like, else by its kind."""
        if self.space.device_kind == "cpu":
            return True
        filled = self._filled.get((kind_of(execution), execution["micro_batch_size"]))
        if filled is not None:
            return filled < FILLED
        if execution["update"] == "eager":
            return True
        small = execution["micro_batch_size"] <= HOST_BOUND_SHARE * self.space.baseline["micro_batch_size"]
        return small and not replays_graphs(execution)

    @functools.cached_property
    def _filled(self) -> dict[tuple[str, int], float]:
        """Share of an update that its kernels take, by kind and micro-batch."""
        return {
            (kind_of(record.execution), record.execution["micro_batch_size"]): sum(
                kernel.milliseconds for kernel in record.kernels
            )
            / 1000
            / record.seconds_per_update
            for record in self._records
            if record.kernels and record.seconds_per_update
        }

    def prospects(self, executions: Mapping[str, dict[str, Any]], verifier: Verifier | None = None) -> list[Prospect]:
        """Those of the executions (by identity) that promise anything, the most gain a second first."""
        names, settings = list(executions), list(executions.values())
        if not names:
            return []
        self.cost.prepare(settings)
        means, sds = self._throughput.predict(settings)
        _, _, from_baseline = self.best
        gains, better = self._gains(settings, means, sds)
        fits = self._fits(settings)
        found = []
        for index in np.flatnonzero(gains > 1e-9):
            execution = settings[index]
            gain = float(gains[index] * fits[index]) * self._chances(execution)
            prediction = self._predict(execution)
            cost = prediction.expected_seconds
            if verifier is not None and from_baseline:
                cost += float(better[index]) * verifier.seconds(self.cost, execution, self.space.baseline)
            found.append(Prospect(execution, names[index], gain, prediction, cost))
        return sorted(found, key=lambda prospect: (-prospect.gain_per_second, prospect.identity))

    def _predict(self, execution: Mapping[str, Any]) -> Prediction:
        return self.cost.predict(execution, protocol=self.space.search_protocol)

    def _gains(self, settings: Sequence[Mapping[str, Any]], means: Floats, sds: Floats) -> tuple[Floats, Floats]:
        """Expected improvement over the best, and the probability of any."""
        log_rate, value, _ = self.best
        if self.objective.kind == "throughput":
            z = (means - log_rate) / sds
            return sds * (z * _normal(z) + np.exp(-z * z / 2) / math.sqrt(2 * math.pi)), _normal(z)
        targets = self.objective.targets
        fixed = np.array([self._fixed(execution) for execution in settings])
        room = np.maximum(value - fixed, 1e-9)  # seconds that updates may take before it is no better
        z = (means - np.log(targets / room)) / sds
        return room * _normal(z) - targets * np.exp(-means + sds**2 / 2) * _normal(z - sds), _normal(z)

    def _fixed(self, execution: Mapping[str, Any]) -> float:
        return self.objective.fixed_seconds(self.cost.starts(execution))

    def _value(self, execution: Mapping[str, Any], log_rate: float) -> float:
        rate_ = math.exp(log_rate)
        return (
            -rate_ if self.objective.kind == "throughput" else self._fixed(execution) + self.objective.targets / rate_
        )

    def _fits(self, settings: Sequence[Mapping[str, Any]]) -> Floats:
        """Probability that each fits in the device's memory."""
        seen = [record for record in self.cost.records if record.memory.peak_reserved_bytes]
        total = min((record.memory.total_bytes for record in seen if record.memory.total_bytes), default=None)
        if total is None:
            return np.ones(len(settings))
        observations = [*peaks(seen), *carried_peaks(self._earlier, self.space.parameters)]
        model = EffectModel(MemoryPrior(self.space.baseline), self.space.baseline, observations)
        means, sds = model.predict(settings)
        return _normal((math.log(FULL_MEMORY * total) - means) / sds)


def _normal(z: Floats) -> Floats:
    """The standard normal distribution function."""
    return 0.5 * (1 + np.array([math.erf(value) for value in z / math.sqrt(2)]))
