"""Whether a run's first updates went as equal runs go: losses and gradient norms against an A/A band.

Equal runs (same recipe, weights and tokens; honest executions, which may differ in the order of their sums) differ by
rounding, and training amplifies that from update to update. How much is measured, not assumed: several equal runs span
a band, and a further one has to stay inside. At every checked update, for loss and gradient norm each,

    |value - median of the runs| <= max(factor x spread, floor) x |median of the runs|

where spread is the widest relative difference between two runs at this update or at an earlier one, since noise that
has grown does not shrink, and runs that happen to meet at one update say little. The floor is what rounding alone may
do: on a CPU equal runs are equal bits, and their band would have no width.

Assumed: the runs and an honest candidate draw from one distribution, independently. For a normal one and no floor, the
share of honest values outside at a single check is, by simulation, 1.5% with three runs and a factor of 5, 0.2% with
four, 0.03% with five (with a factor of 3: 4%, 0.9%, 0.3%). So a band wants four runs or more.

Check early updates: 26 runs of one recipe in bf16 on GH200, by 16 executions, spread over 6e-6 of the loss and 1.3% of
the gradient norm after 120 updates, over 7e-5 and 19% after 220, over 1e-3 and 12% after 320.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tinyllm_ray.records import TrajectoryPoint

CHECKED_UPDATES = (20, 60, 120)
"""Late enough for clipping, schedule and accumulation to matter, early enough for rounding to be small."""

Trajectory = Sequence[TrajectoryPoint]
Quantity = Literal["loss", "grad_norm"]

_QUANTITIES: tuple[Quantity, ...] = ("loss", "grad_norm")


@dataclass(frozen=True)
class Floor:
    """Relative differences that rounding alone may make."""

    loss: float
    grad_norm: float


FLOAT32_FLOOR = Floor(loss=1e-5, grad_norm=1e-3)
"""Other micro-batches and backends changed 4e-7 of the loss and 1.6e-5 of the norm in 120 updates on a CPU."""
BFLOAT16_FLOOR = Floor(loss=1e-4, grad_norm=0.03)


@dataclass(frozen=True)
class Interval:
    """Where a value may lie, both ends included."""

    low: float
    high: float


Band = Mapping[int, Mapping[Quantity, Interval]]
"""Intervals by update."""


def band_of(runs: Sequence[Trajectory], floor: Floor, factor: float = 5.0) -> Band:
    """The band of equal runs, over the updates that all of them have.

    Raises ValueError for fewer than two runs, for runs without an update in common, and where one is not finite.
    """
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run spans no band; it takes two or more, better four")
    points = [{point.update: point for point in run} for run in runs]
    updates = sorted(set.intersection(*map(set, points)))
    if not updates:
        raise ValueError("the runs have no update in common")
    spreads = dict.fromkeys(_QUANTITIES, 0.0)
    band: dict[int, dict[Quantity, Interval]] = {}
    for update in updates:
        band[update] = {}
        for quantity in _QUANTITIES:
            values = [_finite(run[update], quantity) for run in points]
            centre = median(values)
            width = max(values) - min(values)
            spreads[quantity] = max(spreads[quantity], width / abs(centre) if centre else 0.0)
            half = max(factor * spreads[quantity], getattr(floor, quantity)) * abs(centre)
            band[update][quantity] = Interval(centre - half, centre + half)
    return band


def within_band(trajectory: Trajectory, band: Band) -> str | None:
    """Why `trajectory` is not one of the band's runs, in one line; None where it stays inside.

    An update of the band that the trajectory lacks was not proved, and is a reason too.
    """
    points = {point.update: point for point in trajectory}
    for update, intervals in band.items():
        if update not in points:
            return f"update {update} was not recorded"
        for quantity, interval in intervals.items():
            value = getattr(points[update], quantity)
            if value is None or not interval.low <= value <= interval.high:
                name = quantity.replace("grad_norm", "gradient norm")
                shown = "is not finite" if value is None else f"{value:.6g} is outside"
                return f"update {update}: {name} {shown}, equal runs lie in {interval.low:.6g} to {interval.high:.6g}"
    return None


def _finite(point: TrajectoryPoint, quantity: Quantity) -> float:
    value: float | None = getattr(point, quantity)
    if value is None or not math.isfinite(value):
        raise ValueError(f"update {point.update}: the {quantity} of a run that spans the band is not finite")
    return value
