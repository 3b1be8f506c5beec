"""An A/A band refuses runs that trained otherwise than asked, and no run that only rounds otherwise."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from liars import LIES, Lie, lying, small_config, trajectory

from tinyllm_ray.config import load
from tinyllm_ray.measure.band import (
    BFLOAT16_FLOOR,
    CHECKED_UPDATES,
    EARLY_UPDATES,
    FLOAT32_FLOOR,
    Band,
    Floor,
    Interval,
    Trajectory,
    band_of,
    of_equal_runs,
    prior_spread,
    within_band,
)
from tinyllm_ray.records import TrajectoryPoint
from tinyllm_ray.train.recipe import learning_rate_sum
from tinyllm_ray.yamlfile import read_mapping

NO_FLOOR = Floor(loss=0.0, grad_norm=0.0)
SEEDS = (1, 2, 3)


def points(*values: tuple[float | None, float | None], updates: tuple[int, ...] = CHECKED_UPDATES) -> Trajectory:
    return [
        TrajectoryPoint(update=update, loss=loss, grad_norm=norm)
        for update, (loss, norm) in zip(updates, values, strict=False)
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def honest_band(seed: int, floor: Floor) -> Band:
    """Of whole updates: equal runs, which a CPU repeats bit by bit, so that one of them rounds otherwise."""
    runs = [list(trajectory(small_config(seed, micro_batch_size=size), CHECKED_UPDATES)) for size in (8, 4, 8)]
    return band_of(runs, floor)


def verdict(seed: int, floor: Floor, lie: Lie | None = None, **execution: object) -> str | None:
    """Why a run is refused; it ends where it is."""
    band = honest_band(seed, floor)
    with lying(lie):
        run = trajectory(small_config(seed, **execution), CHECKED_UPDATES)
        for point in run:
            reason = within_band([point], {point.update: band[point.update]})
            if reason is not None:
                return reason
    return None


@pytest.mark.parametrize("floor", [FLOAT32_FLOOR, BFLOAT16_FLOOR], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_every_liar_is_caught(lie: Lie, floor: Floor) -> None:
    assert verdict(SEEDS[0], floor, lie) is not None


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_honest_executions_pass(seed: int) -> None:
    assert verdict(seed, FLOAT32_FLOOR, micro_batch_size=2, sdpa_backend="flash") is None
    assert verdict(seed, FLOAT32_FLOOR, micro_batch_size=4, sdpa_backend="math") is None


def test_another_seed_is_another_run() -> None:
    other = list(trajectory(small_config(SEEDS[1]), CHECKED_UPDATES[:1]))
    reason = within_band(other, {CHECKED_UPDATES[0]: honest_band(SEEDS[0], BFLOAT16_FLOOR)[CHECKED_UPDATES[0]]})
    assert reason is not None
    assert reason.startswith("update 20: loss ")


GH200 = read_mapping(Path(__file__).with_name("gh200_trajectories.yaml"))


class TestRecordedRuns:
    """26 runs by 16 executions on GH200 nodes, in bf16."""

    runs = tuple(points(*run, updates=(120, 220, 320)) for run in GH200["runs"])

    @pytest.mark.parametrize("first", range(26))
    def test_a_band_of_any_four_holds_all_at_update_120(self, first: int) -> None:
        band = band_of([(self.runs * 2)[first + at][:1] for at in range(4)], BFLOAT16_FLOOR)
        assert [within_band(run, band) for run in self.runs] == [None] * 26

    def rates(self, update: int) -> float:
        """That recipe warms up to 0.001 over 5% of its 12,453 updates."""
        return sum(0.001 * done / 622.65 for done in range(1, update + 1))

    @pytest.mark.parametrize("first", range(26))
    def test_a_band_around_any_single_one_holds_all_at_every_update(self, first: int) -> None:
        band = of_equal_runs([self.runs[first]], self.rates, float32=False)
        assert list(band) == [120, 220, 320]
        assert [within_band(run, band) for run in self.runs] == [None] * 26

    def test_a_replayed_batch_is_refused_by_a_single_run(self) -> None:
        band = of_equal_runs([self.runs[0]], self.rates, float32=False)
        reason = within_band(points(*GH200["replayed_batch"], updates=(120, 220, 320)), band)
        assert reason is not None
        assert reason.startswith("update 120: loss 7.58187 is outside, equal runs lie in 8.48")

    def test_a_replayed_batch_is_refused(self) -> None:
        band = band_of(self.runs[:4], BFLOAT16_FLOOR)
        reason = within_band(points(*GH200["replayed_batch"], updates=(120, 220, 320)), band)
        assert reason is not None
        assert reason.startswith("update 120: loss 7.58187 is outside, equal runs lie in 8.50")


H200 = read_mapping(Path(__file__).with_name("h200_trajectories.yaml"))


def recorded(name: str) -> list[Trajectory]:
    return [points(*run, updates=tuple(H200["updates"])) for run in H200[name]]


@pytest.mark.parametrize(
    ("name", "preset", "changes"),
    [("preset_20m_at_32768", "20m", ["training.tokens_per_update=32768"]), ("preset_20m_32k", "20m-32k", [])],
)
class TestOtherRecipes:
    """Whole trials by 21 and 18 executions on H200s: rounding that 120 updates made up to 0.5% of the loss."""

    def test_a_band_around_any_single_run_holds_all(self, name: str, preset: str, changes: list[str]) -> None:
        rates = functools.cache(functools.partial(learning_rate_sum, load(preset, changes)))
        runs = recorded(name)
        for first in runs:
            for other in runs:
                shared = {point.update for point in first} & {point.update for point in other}
                band = of_equal_runs([[p for p in first if p.update in shared]], rates, float32=False)
                assert within_band(other, band) is None

    def test_the_prior_is_no_less_than_they_spread(self, name: str, preset: str, changes: list[str]) -> None:
        config = load(preset, changes)
        for update in (60, 120):
            reached = [point for run in recorded(name) for point in run if point.update == update]
            prior = prior_spread(update, learning_rate_sum(config, update), float32=False)
            assert spread([point.loss for point in reached]) <= 1.05 * prior.loss
            assert spread([point.grad_norm for point in reached]) <= 1.05 * prior.grad_norm


def spread(values: list[float | None]) -> float:
    seen = [value for value in values if value is not None]
    return (max(seen) - min(seen)) / median(seen)


@functools.cache
def band_of_a_single_run() -> Band:
    config, updates = small_config(SEEDS[0]), (*EARLY_UPDATES, *CHECKED_UPDATES)
    rates = functools.partial(learning_rate_sum, config)
    return of_equal_runs([list(trajectory(config, updates))], rates, float32=False)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_every_liar_is_caught_beside_a_single_run(lie: Lie) -> None:
    """By what a study judges with, where rounding may do the most: late updates alone would not tell."""
    band = band_of_a_single_run()
    with lying(lie):
        run = trajectory(small_config(SEEDS[0]), (*EARLY_UPDATES, *CHECKED_UPDATES))
        assert any(within_band([point], {point.update: band[point.update]}) is not None for point in run)


class TestBand:
    @pytest.mark.parametrize(("float32", "loss"), [(True, 1e-5), (False, 1e-4)])
    def test_a_single_run_has_a_band_around_it(self, float32: bool, loss: float) -> None:
        (intervals,) = of_equal_runs([points((10.0, 2.0))], lambda update: 0.0, float32=float32).values()
        assert intervals["loss"] == Interval(pytest.approx(10 * (1 - loss)), pytest.approx(10 * (1 + loss)))

    @pytest.mark.parametrize(("update", "loss", "grad_norm"), [(1, 1e-4, 0.03), (20, 1e-4, 0.03), (60, 3.6e-3, 0.18)])
    def test_no_rates_widen_it_early_by_more_than_rounding_grows(
        self, update: int, loss: float, grad_norm: float
    ) -> None:
        """Where a recipe moves weights far in its first updates, as wrong ones do."""
        run = points((10.0, 2.0), updates=(update,))
        (intervals,) = of_equal_runs([run], lambda update: 1.0, float32=False).values()
        assert intervals["loss"].high == pytest.approx(10 * (1 + loss), rel=1e-3)
        assert intervals["grad_norm"].high == pytest.approx(2 * (1 + grad_norm), rel=1e-2)

    def test_in_float32_what_120_updates_make_of_rounding_widens_nothing(self) -> None:
        run = points((10.0, 2.0), updates=(120,))
        (intervals,) = of_equal_runs([run], lambda update: 0.0116, float32=True).values()
        assert intervals["loss"].high == pytest.approx(10 * (1 + FLOAT32_FLOOR.loss), rel=1e-6)
        assert intervals["grad_norm"].high == pytest.approx(2 * (1 + FLOAT32_FLOOR.grad_norm), rel=1e-6)

    def test_runs_that_lie_apart_widen_it(self) -> None:
        runs = [points((10.0, 2.0)), points((10.1, 2.0))]
        (intervals,) = of_equal_runs(runs, lambda update: 0.0, float32=False, factor=2.0).values()
        assert intervals["loss"] == Interval(pytest.approx(9.85), pytest.approx(10.25))

    def test_no_run_spans_no_band(self) -> None:
        with pytest.raises(ValueError, match="0 run spans no band"):
            of_equal_runs([], lambda update: 0.0, float32=True)

    def test_its_width_is_the_spread_times_the_factor(self) -> None:
        runs = [points((10.0, 1.0)), points((11.5, 1.0)), points((9.5, 1.1))]
        (intervals,) = band_of(runs, NO_FLOOR, factor=2.0).values()
        assert intervals == {"loss": Interval(6.0, 14.0), "grad_norm": Interval(pytest.approx(0.8), pytest.approx(1.2))}

    def test_the_floor_gives_equal_runs_a_width(self) -> None:
        (intervals,) = band_of([points((10.0, 2.0))] * 3, Floor(loss=0.01, grad_norm=0.1)).values()
        assert intervals["loss"] == Interval(pytest.approx(9.9), pytest.approx(10.1))
        assert intervals["grad_norm"] == Interval(pytest.approx(1.8), pytest.approx(2.2))

    def test_noise_that_was_seen_earlier_counts_later(self) -> None:
        runs = [points((10.0, 1.0), (5.0, 1.0)), points((10.1, 1.0), (5.0, 1.0))]
        band = band_of(runs, NO_FLOOR, factor=1.0)
        assert within_band(points((10.05, 1.0), (5.049, 1.0)), band) is None
        assert within_band(points((10.05, 1.0), (5.051, 1.0)), band) is not None

    def test_noise_of_later_updates_does_not_count_earlier(self) -> None:
        runs = [points((10.0, 1.0), (5.0, 1.0)), points((10.0, 1.0), (6.0, 1.0))]
        assert within_band(points((10.01, 1.0), (5.5, 1.0)), band_of(runs, NO_FLOOR)) is not None

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ([(10.0, 1.0)], "update 60 was not recorded"),
            ([(None, 1.0), (10.0, 1.0)], "update 20: loss is not finite, equal runs lie in 9 to 11"),
            ([(10.0, None), (10.0, 1.0)], "update 20: gradient norm is not finite, equal runs lie in 0.5 to 1.5"),
            ([(10.0, 1.0), (10.0, 1.6)], "update 60: gradient norm 1.6 is outside, equal runs lie in 0.5 to 1.5"),
            ([(8.9, 1.0), (10.0, 1.0)], "update 20: loss 8.9 is outside, equal runs lie in 9 to 11"),
        ],
    )
    def test_what_is_not_inside_is_named(self, values: list[tuple[float | None, float | None]], reason: str) -> None:
        band = band_of([points((10.0, 1.0), (10.0, 1.0))] * 2, Floor(loss=0.1, grad_norm=0.5))
        assert within_band(points(*values), band) == reason

    @pytest.mark.parametrize(
        ("runs", "message"),
        [
            ([points((1.0, 1.0))], "1 run spans no band"),
            ([points((1.0, 1.0)), points((1.0, 1.0), updates=(7,))], "no update in common"),
            ([points((1.0, 1.0)), points((1.0, None))], "update 20: the grad_norm of a run .* is not finite"),
        ],
    )
    def test_what_spans_no_band_is_refused(self, runs: list[Trajectory], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            band_of(runs, NO_FLOOR)

    @given(
        runs=st.lists(st.tuples(*[st.tuples(st.floats(0.1, 20), st.floats(1e-3, 1e3))] * 3), min_size=2, max_size=6),
        factor=st.floats(1.01, 10.0),
    )
    def test_runs_that_span_it_lie_inside(self, runs: list[tuple[tuple[float, float], ...]], factor: float) -> None:
        band = band_of([points(*run) for run in runs], NO_FLOOR, factor)
        assert [within_band(points(*run), band) for run in runs] == [None] * len(runs)

    @pytest.mark.parametrize(("runs", "refused"), [(3, 0.02), (4, 0.004), (5, 0.001)])
    def test_few_equal_runs_are_refused(self, runs: int, refused: float) -> None:
        """As the module says of normal noise, a single check and no floor; the share of 4,000 draws."""
        generator = random.Random(0)

        def draw() -> Trajectory:
            return points((generator.gauss(8.0, 0.001), 1.0))

        strange = sum(
            within_band(draw(), band_of([draw() for _ in range(runs)], NO_FLOOR)) is not None for _ in range(4000)
        )
        assert strange / 4000 < refused
