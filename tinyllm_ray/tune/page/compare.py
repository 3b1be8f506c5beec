"""Two studies beside each other: what became faster or slower, and by more than noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.noise import record_bounds, spread_of
from tinyllm_ray.tune.page.findings import believed
from tinyllm_ray.tune.page.study import flat


@dataclass(frozen=True)
class Comparison:
    """One execution that both studies measured."""

    candidate: str
    """Its name in the first."""
    first: float
    second: float
    """Targets a second."""
    low: float
    high: float
    """The second's throughput over the first's lies here with 95% confidence, by the noise of windows and processes."""

    @property
    def ratio(self) -> float:
        return self.second / self.first

    @property
    def differs(self) -> bool:
        """Whether it is more than noise, of this execution by itself."""
        return not self.low <= 1 <= self.high


def compare(first: Sequence[TrialRecord], second: Sequence[TrialRecord]) -> list[Comparison]:
    """Every execution with a believed figure in both, the fastest of the second first.

    Raises ConfigError where the studies are of different recipes, or have no execution in common.
    """
    recipes = [{record.recipe_identity for record in study} for study in (first, second)]
    if recipes[0] and recipes[1] and recipes[0].isdisjoint(recipes[1]):
        raise ConfigError("the two studies are of different recipes: throughputs compare within one recipe only")
    # One after the other: the same execution in both is what is compared, and no repeat.
    spread = spread_of(second, spread_of(first))
    ones, others = _by_execution(first), _by_execution(second)
    found = []
    for identity, one in ones.items():
        other = others.get(identity)
        bounds = [record_bounds(record, spread) for record in (one, other) if record]
        if other is None or one.targets_per_second is None or other.targets_per_second is None:
            continue
        margin = math.hypot(*(math.log(bound.high / bound.low) / 2 for bound in bounds if bound))
        ratio = other.targets_per_second / one.targets_per_second
        found.append(
            Comparison(
                one.candidate,
                one.targets_per_second,
                other.targets_per_second,
                ratio * math.exp(-margin),
                ratio * math.exp(margin),
            )
        )
    if not found:
        raise ConfigError("the two studies have no execution in common that both have a figure of")
    return sorted(found, key=lambda one: -one.second)


def differences(first: Sequence[TrialRecord], second: Sequence[TrialRecord]) -> list[tuple[str, str, str]]:
    """What differs beside the executions: device, versions, data, source; name, the first's value, the second's."""
    ones, others = (_surroundings(study) for study in (first, second))
    names = [name for name in ones | others if ones.get(name) != others.get(name)]
    return [(name, ones.get(name, "none"), others.get(name, "none")) for name in names]


def table_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """The comparison for a terminal."""
    width = max(len("execution"), *(len(one.candidate) for one in comparisons))
    lines = [f"{'execution':{width}}  {'first':>12}  {'second':>12}  {'ratio':>7}  noise"]
    for one in comparisons:
        verdict = ("faster" if one.ratio > 1 else "slower") if one.differs else "no difference shown"
        lines.append(
            f"{one.candidate:{width}}  {one.first:12,.0f}  {one.second:12,.0f}  {one.ratio:6.3f}x"
            f"  {one.low:.3f} to {one.high:.3f}: {verdict}"
        )
    return lines


def _by_execution(study: Sequence[TrialRecord]) -> dict[str, TrialRecord]:
    """The last figure of the search for each execution."""
    return {one.execution_identity: one for one in study if one.purpose == "search" and believed(one)}


def _surroundings(study: Sequence[TrialRecord]) -> dict[str, str]:
    last = next((record for record in reversed(study) if record.environment), study[-1] if study else None)
    if last is None:
        return {}
    environment = {name: last.environment[name] for name in _TELLING if name in last.environment}
    devices = ", ".join(sorted({device.name for record in study for device in record.devices}))
    return {
        "device": devices,
        "cache": str(last.cache_identity)[:12],
        "source": last.source_identity[:12],
        **dict(flat(environment)),
    }


_TELLING = ("python", "versions", "cuda", "cudnn", "driver", "hostname")
