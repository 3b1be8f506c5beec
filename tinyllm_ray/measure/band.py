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

A study has one or two runs of its baseline, and repeats of one execution may be equal bits where other executions are
not. There the half width is no less than a multiple of a prior (`of_equal_runs`): the widest that equal runs were seen
to spread, 20m in bf16 by 16 to 21 executions a recipe.

    recipe, text, runs             update  sum of learning rates so far  spread of the loss  of the gradient norm
    peak 0.001, C4, 26 on GH200    120     0.012                         6e-6                1.3%
                                   220     0.039                         7e-5                19%
                                   320     0.082                         1e-3                12%
    peak 0.001, sotu, 21 on H200   20      0.0003                        6e-6                0.02%
                                   60      0.003                         7e-6                0.01%
                                   120     0.012                         1.0e-3              31%
    peak 0.0056, sotu, 27 on H200  20      0.002                         8e-6                0.02%
                                   60      0.016                         2.4e-4              1.6%
                                   120     0.065                         5.5e-3              120%

AdamW moves a weight by about the learning rate an update, so that their sum says how far weights have come; but what
rounding has become by then differs by recipe and text, up to 170 times. From update 20 on it grew by at most 9% an
update in the loss and 14% in the norm. The prior is the narrower of two bounds that these spreads keep to, one by the
sum and one by the updates. Late updates prove little for it: what a wrong execution does is looked for in the early
ones, where equal runs agree to 1e-5.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tinyllm_ray.figures import told_apart
from tinyllm_ray.records import TrajectoryPoint

CHECKED_UPDATES = (20, 60, 120)
"""Late enough for clipping, schedule and accumulation to matter, early enough for rounding to be small."""

EARLY_UPDATES = (1, 5, 10)
"""Checked as well, so that runs have updates in common however short the protocol of one of them is."""

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

_PRIOR_AT = 0.0116
"""Sum of learning rates at which the prior is 1.05e-3 and 0.31: up to there as fast as spreads grow, then with it."""
_GROWTH_AN_UPDATE = 0.12
"""Of what rounding did in 20 updates, in nats; from 20 on 0.086 at most was seen of the loss and 0.135 of the norm, but
that from a fifth of the 5e-4 at which the bound begins."""
_PRIOR_FACTOR = 3.0
"""Of the prior, which is the width of some twenty runs: one of them lies up to a width from another."""
_FLOAT32_SHARE = 1e-3
"""Of the prior, in float32: its rounding is 65,000 times finer, and grows as fast."""


def prior_spread(update: int, learning_rates: float, *, float32: bool) -> Floor:
    """The spread of equal runs at an update up to which rates add up to `learning_rates`, as seen elsewhere."""
    way = learning_rates / _PRIOR_AT
    grown = math.exp(_GROWTH_AN_UPDATE * min(max(update - 20, 0), 120))
    share = _FLOAT32_SHARE if float32 else 1.0
    return Floor(
        loss=share * min(0.02, 1.05e-3 * min(way**2.6, way), 1e-5 * grown),
        grad_norm=share * min(1.2, 0.31 * min(way**2.2, way), 5e-4 * grown),
    )


@dataclass(frozen=True)
class Interval:
    """Where a value may lie, both ends included."""

    low: float
    high: float


Band = Mapping[int, Mapping[Quantity, Interval]]
"""Intervals by update."""


def of_equal_runs(
    runs: Sequence[Trajectory], learning_rates: Callable[[int], float], *, float32: bool, factor: float = 5.0
) -> Band:
    """The band of one equal run or more, computed in float32 or else in bf16 autocast, where rounding does more.

    Of a single run it is what lies around it. The spread counts as no less than the prior, for which `learning_rates`
    says what the rates of the first n updates add up to. Raises ValueError as `band_of` does, and for no run at all.
    """
    floor = FLOAT32_FLOOR if float32 else BFLOAT16_FLOOR

    def floor_at(update: int) -> Floor:
        prior = prior_spread(update, learning_rates(update), float32=float32)
        loss, grad_norm = _PRIOR_FACTOR * prior.loss, _PRIOR_FACTOR * prior.grad_norm
        return Floor(max(floor.loss, loss), max(floor.grad_norm, grad_norm))

    return band_of([*runs, *runs] if len(runs) == 1 else runs, floor_at, factor)


def band_of(runs: Sequence[Trajectory], floor: Floor | Callable[[int], Floor], factor: float = 5.0) -> Band:
    """The band of equal runs, over the updates that all of them have; `floor` may depend on the update.

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
        least = floor if isinstance(floor, Floor) else floor(update)
        band[update] = {}
        for quantity in _QUANTITIES:
            values = [_finite(run[update], quantity) for run in points]
            centre = median(values)
            width = max(values) - min(values)
            spreads[quantity] = max(spreads[quantity], width / abs(centre) if centre else 0.0)
            half = max(factor * spreads[quantity], getattr(least, quantity)) * abs(centre)
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
                ends = (interval.low, interval.high)
                low, high, *own = told_apart(".6g", *ends, *([] if value is None else [value]))
                shown = f"{own[0]} is outside" if own else "is not finite"
                return f"update {update}: {name} {shown}, equal runs lie in {low} to {high}"
    return None


def _finite(point: TrajectoryPoint, quantity: Quantity) -> float:
    value: float | None = getattr(point, quantity)
    if value is None or not math.isfinite(value):
        raise ValueError(f"update {point.update}: the {quantity} of a run that spans the band is not finite")
    return value
