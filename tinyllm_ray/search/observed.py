"""Records as the models' observations: throughput and memory, a study's own and those of earlier studies."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinyllm_ray.measure.bounds import window_error
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.earlier import OWN, EarlierStudy, Origin
from tinyllm_ray.search.effects import PROCESS_SD, Observation, ThroughputPrior
from tinyllm_ray.search.noise import NoiseOfWindows
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.ruled_out import RAN

PEAK_SD = 0.05
"""Standard deviation of a process's peak of memory, as a logarithm."""


def rates(records: Sequence[TrialRecord], origin: Origin = OWN) -> list[Observation]:
    """One for each record that has a throughput, with its place in the order of its device."""
    noise = NoiseOfWindows(records)
    ran: Counter[str | None] = Counter()
    found = []
    for record in records:
        device = (record.devices[0].identifier or record.devices[0].host) if record.devices else None
        timed = [window.targets_per_second for window in record.windows]
        error = window_error(timed, noise.of_record(record)) if timed and min(timed) > 0 else 0.0
        value = math.log(rate(record) or 1.0)
        found.append(Observation(record.execution, value, math.hypot(PROCESS_SD, error), device, ran[device], origin))
        ran[device] += 1
    return found


def carried_rates(prior: ThroughputPrior) -> list[Observation]:
    """Earlier studies' throughputs, each as far from what `prior` expects as it was from what was expected there."""
    found = []
    for origin, study in _earlier(prior.priors.earlier, prior.parameters):
        there = replace(prior, parameters=study.parameters)
        ran = [record for record in study.records if record.fate in RAN and rate(record) is not None]
        for seen in rates(ran, origin):
            shift = prior.mean(seen.execution) - there.mean(seen.execution)
            found.append(seen._replace(value=seen.value + shift))
    return found


def peaks(records: Sequence[TrialRecord], origin: Origin = OWN) -> list[Observation]:
    """One for each record that has a peak of memory."""
    seen = [(record.execution, record.memory.peak_reserved_bytes) for record in records]
    return [Observation(execution, math.log(peak), PEAK_SD, origin=origin) for execution, peak in seen if peak]


def carried_peaks(studies: Sequence[EarlierStudy], parameters: int) -> list[Observation]:
    """Earlier studies' peaks; how much larger all of them are here, the first of this study's own records shows."""
    return [seen for origin, study in _earlier(studies, parameters) for seen in peaks(study.records, origin)]


def _earlier(studies: Sequence[EarlierStudy], parameters: int) -> Iterator[tuple[Origin, EarlierStudy]]:
    for number, study in enumerate(studies, start=1):
        yield Origin(number, math.log(study.parameters / parameters)), study
