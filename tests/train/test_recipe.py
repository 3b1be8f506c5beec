"""Budgets, epochs and the schedule, as arithmetic."""

import decimal
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.sections import TrainingConfig
from tinyllm_ray.train.recipe import (
    check_checkpoints,
    epoch_ends,
    epochs,
    learning_rate,
    run_updates,
    solo_config,
    total_updates,
    updates_after_epoch,
)

MakeConfig = Callable[..., Config]


def with_training(config: Config, **settings: object) -> Config:
    """Without validation, which a property test would spend its time on."""
    values = config.training.model_dump() | settings
    return config.model_copy(update={"training": TrainingConfig.model_construct(**values)})


def rates(config: Config) -> list[float]:
    return [learning_rate(config, update) for update in range(total_updates(config))]


class TestUpdates:
    @given(
        budget=st.integers(1, 10**13),
        epochs=st.integers(1, 500),
        batch=st.integers(1, 10**7),
        epoch=st.integers(1, 500),
    )
    def test_a_budget_in_tokens_is_rounded_by_the_formula(
        self, tiny: MakeConfig, budget: int, epochs: int, batch: int, epoch: int
    ) -> None:
        """floor(k T / (E B) + 1/2), in whole numbers: floor((2 k T + E B) / (2 E B))."""
        epoch = min(epoch, epochs)
        config = with_training(tiny(), token_budget=budget, epochs=epochs, tokens_per_update=batch)
        expected = (2 * epoch * budget + epochs * batch) // (2 * epochs * batch)
        assert updates_after_epoch(config, epoch) == expected

    @given(
        ratio=st.floats(0.001, 1000, allow_nan=False),
        epochs=st.integers(1, 100),
        batch=st.integers(1, 10**6),
        epoch=st.integers(1, 100),
    )
    def test_a_budget_in_tokens_a_parameter_is_rounded_by_the_formula(
        self, tiny: MakeConfig, ratio: float, epochs: int, batch: int, epoch: int
    ) -> None:
        """floor(k e P / B + 1/2), where a ratio counts as the decimal number that is written."""
        base, epoch = tiny(), min(epoch, epochs)
        config = with_training(
            base, token_budget=None, tokens_per_parameter=ratio, epochs=epochs, tokens_per_update=batch
        )
        above, below = Fraction(str(ratio)).as_integer_ratio()
        tokens, scale = epoch * above * base.model.parameters, below * epochs * batch
        assert updates_after_epoch(config, epoch) == (2 * tokens + scale) // (2 * scale)

    def test_half_an_update_is_rounded_up(self, tiny: MakeConfig) -> None:
        config = tiny(training={"tokens_per_update": 128, "token_budget": 3 * 64, "epochs": 3})
        assert [updates_after_epoch(config, epoch) for epoch in (1, 2, 3)] == [1, 1, 2]

    @pytest.mark.parametrize(
        ("preset", "parameters", "tokens_per_update"),
        [
            ("20m", 20_403_520, 131_072),
            ("20m-32k", 20_403_520, 32_768),
            ("50m", 48_507_392, 32_768),
            ("90m", 91_605_120, 32_768),
            ("250m", 251_943_360, 262_144),
            ("500m", 516_814_080, 262_144),
        ],
    )
    def test_presets_see_20_tokens_a_parameter_in_40_epochs_of_half(
        self, preset: str, parameters: int, tokens_per_update: int
    ) -> None:
        config = load(preset)
        for epoch in range(1, 41):
            exact = Fraction(epoch * parameters, 2 * tokens_per_update)
            assert updates_after_epoch(config, epoch) == math.floor(exact + Fraction(1, 2))
        assert total_updates(config) == round(Fraction(20 * parameters, tokens_per_update))
        assert len(epoch_ends(config)) == 40

    def test_the_20m_recipe_is_3113_updates_long(self) -> None:
        assert total_updates(load("20m")) == 3113
        assert total_updates(load("20m-32k")) == 12_453

    def test_a_budget_below_half_an_update_is_one_update(self, tiny: MakeConfig) -> None:
        assert total_updates(tiny(training={"token_budget": 1})) == 1

    def test_max_updates_cuts_the_run_and_only_the_run(self, tiny: MakeConfig) -> None:
        whole = tiny()
        cut, longer = tiny(training={"max_updates": 7}), tiny(training={"max_updates": 10**6})
        assert (run_updates(whole), run_updates(cut), run_updates(longer)) == (100, 7, 100)
        assert total_updates(cut) == 100
        assert rates(cut) == rates(whole)
        assert cut.recipe_identity == whole.recipe_identity


def rounded(exact: Fraction) -> int:
    """To whole updates, half of one up."""
    whole, rest = divmod(exact, 1)
    return whole + (2 * rest >= 1)


class TestEpochsByRatio:
    """`epoch_tokens_per_parameter` sets their length; the budget then sets their number."""

    @given(
        ratio=st.decimals("0.01", 50, places=3),
        budget_ratio=st.decimals("0.1", 100, places=2),
        batch=st.integers(1, 10**6),
        epoch=st.integers(1, 400),
    )
    def test_each_ends_where_its_tokens_do_and_the_last_with_the_budget(
        self, tiny: MakeConfig, ratio: decimal.Decimal, budget_ratio: decimal.Decimal, batch: int, epoch: int
    ) -> None:
        base = tiny()
        config = with_training(
            base,
            token_budget=None,
            tokens_per_parameter=float(budget_ratio),
            epoch_tokens_per_parameter=float(ratio),
            tokens_per_update=batch,
        )
        parameters, number = base.model.parameters, -(-Fraction(budget_ratio) // Fraction(ratio))
        assert epochs(config) == number
        whole = rounded(Fraction(budget_ratio) * parameters / batch)
        ends_at = rounded(Fraction(ratio) * epoch * parameters / batch) if epoch < number else whole
        assert updates_after_epoch(config, epoch) == ends_at
        assert total_updates(config) == max(1, whole)

    def test_half_a_token_a_parameter_is_the_40_epochs_of_the_presets(self) -> None:
        by_number, by_ratio = load("20m"), load("20m", ["training.epoch_tokens_per_parameter=0.5"])
        assert epoch_ends(by_ratio) == epoch_ends(by_number)

    def test_the_number_of_epochs_does_not_count_beside_it(self, tiny: MakeConfig) -> None:
        one, many = (tiny(training={"epoch_tokens_per_parameter": 0.1, "epochs": epochs}) for epochs in (1, 99))
        assert epoch_ends(one) == epoch_ends(many)

    def test_the_last_is_shorter_where_the_budget_is_no_multiple(self, tiny: MakeConfig) -> None:
        parameters = tiny().model.parameters
        settings = {"epoch_tokens_per_parameter": 2, "token_budget": 5 * parameters, "tokens_per_update": 16}
        config = tiny(training=settings, execution={"micro_batch_size": 1})
        assert epochs(config) == 3
        ends = [rounded(Fraction(multiple * parameters, 16)) for multiple in (2, 4, 5)]
        assert list(epoch_ends(config).items()) == list(zip(ends, (1, 2, 3), strict=True))

    def test_a_tenth_is_a_tenth(self, tiny: MakeConfig) -> None:
        """0.3 / 0.1 is a little below 3 in floating point, and a little above in others: 0.7 / 0.1, 0.6 / 0.2."""
        for budget, ratio, number in ((0.3, 0.1, 3), (0.7, 0.1, 7), (0.6, 0.2, 3), (1.1, 0.1, 11)):
            config = tiny(
                training={"token_budget": None, "tokens_per_parameter": budget} | {"epoch_tokens_per_parameter": ratio}
            )
            assert epochs(config) == number

    def test_one_longer_than_the_budget_is_the_only_one(self, tiny: MakeConfig) -> None:
        config = tiny(training={"epoch_tokens_per_parameter": 1000})
        assert epoch_ends(config) == {100: 1}

    def test_one_of_a_fraction_of_a_token_is_answered_at_once(self, tiny: MakeConfig) -> None:
        """1e-9 tokens a parameter are 8e8 epochs, which share the ends of 100 updates."""
        config = tiny(training={"epoch_tokens_per_parameter": 1e-9})
        assert epochs(config) > 10**8
        assert sorted(epoch_ends(config)) == list(range(1, 101))
        assert epoch_ends(config)[100] == epochs(config)


class TestEpochEnds:
    def test_every_epoch_ends_where_its_tokens_do(self, tiny: MakeConfig) -> None:
        assert epoch_ends(tiny()) == {25: 1, 50: 2, 75: 3, 100: 4}

    def test_epochs_shorter_than_an_update_share_their_end(self, tiny: MakeConfig) -> None:
        # After epochs 1 to 8: 0.375, 0.75, 1.125, 1.5, 1.875, 2.25, 2.625, 3 updates' tokens.
        config = tiny(training={"token_budget": 3 * 128, "epochs": 8})
        assert epoch_ends(config) == {1: 3, 2: 6, 3: 8}

    @given(budget=st.integers(1, 10**5), epochs=st.integers(1, 60))
    def test_the_last_update_ends_the_last_epoch(self, tiny: MakeConfig, budget: int, epochs: int) -> None:
        config = with_training(tiny(), token_budget=budget, epochs=epochs)
        ends = epoch_ends(config)
        assert ends[total_updates(config)] == epochs
        assert 0 not in ends
        named = [ends[end] for end in sorted(ends)]
        assert named == sorted(set(named))
        assert all(max(1, updates_after_epoch(config, epoch)) == end for end, epoch in ends.items())

    @given(
        tokens=st.integers(1, 3000),
        length=st.integers(1, 3000),
        by_ratio=st.booleans(),
        batch=st.integers(1, 500),
    )
    def test_are_those_of_every_epoch_in_turn(
        self, tiny: MakeConfig, tokens: int, length: int, by_ratio: bool, batch: int
    ) -> None:
        base = tiny()
        if by_ratio:  # few parameters, so that epochs are about as long as an update
            base = base.model_copy(update={"model": base.model.model_copy(update={"vocab_size": 1, "layers": 0})})
            ratio = length / 100
            config = with_training(
                base, token_budget=tokens, epoch_tokens_per_parameter=ratio, epochs=1, tokens_per_update=batch
            )
        else:
            config = with_training(base, token_budget=tokens, epochs=length, tokens_per_update=batch)
        expected: dict[int, int] = {}
        for epoch in range(1, epochs(config) + 1):
            expected[updates_after_epoch(config, epoch)] = epoch
        expected.pop(0, None)
        assert epoch_ends(config) == expected | {total_updates(config): epochs(config)}


class TestCheckpoints:
    """Of the recipe, whose last update is the hundredth; where a run is cut may change when it goes on."""

    @pytest.mark.parametrize("updates", [[100], [1, 7]])
    @pytest.mark.parametrize("max_updates", [None, 3])
    def test_up_to_the_last_update_they_may_be_asked_for(
        self, tiny: MakeConfig, updates: list[int], max_updates: int | None
    ) -> None:
        output = {"checkpoint": "explicit", "checkpoint_updates": updates}
        check_checkpoints(tiny(output=output, training={"max_updates": max_updates}))

    def test_those_beyond_it_are_refused(self, tiny: MakeConfig) -> None:
        config = tiny(output={"checkpoint": "explicit", "checkpoint_updates": [7, 101, 100]})
        with pytest.raises(ConfigError, match="checkpoint_updates: 101 is beyond the recipe's last update, 100; leave"):
            check_checkpoints(config)

    def test_without_any_there_is_nothing_to_refuse(self, tiny: MakeConfig) -> None:
        check_checkpoints(tiny())


class TestLearningRate:
    def test_warms_up_in_equal_steps_to_the_peak(self, tiny: MakeConfig) -> None:
        found = rates(tiny(training={"warmup_fraction": 0.1}))
        assert found[:10] == pytest.approx([0.001 * step for step in range(1, 11)], rel=1e-12)
        assert max(found) == found[9] == 0.01

    def test_follows_the_cosine_down(self, tiny: MakeConfig) -> None:
        found = rates(tiny(training={"warmup_fraction": 0.1, "final_fraction": 0.2}))
        assert found[54] == pytest.approx(0.01 * (0.2 + 0.8 / 2), rel=1e-12), "half of the way down"
        assert found[31] - found[33] == pytest.approx(found[75] - found[77], rel=1e-9), "the same fall both sides of it"

    @pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
    @pytest.mark.parametrize("warmup", [0.0, 0.05, 0.123])
    def test_the_last_update_has_exactly_the_final_rate(self, tiny: MakeConfig, warmup: float, final: float) -> None:
        config = tiny(training={"warmup_fraction": warmup, "final_fraction": final})
        assert rates(config)[-1] == 0.01 * final
        assert learning_rate(config, 100) == learning_rate(config, 10**6) == 0.01 * final

    @given(budget=st.integers(1, 10**5), warmup=st.floats(0, 1), final=st.floats(0, 1))
    def test_rises_then_falls_and_stays_within_its_bounds(
        self, tiny: MakeConfig, budget: int, warmup: float, final: float
    ) -> None:
        config = with_training(tiny(), token_budget=budget, warmup_fraction=warmup, final_fraction=final)
        found, steps = rates(config), warmup * total_updates(config)
        rising, falling = found[: int(steps)], found[int(steps) :]
        assert rising == sorted(rising)
        slack = 1e-12
        assert all(after <= before + slack for before, after in itertools.pairwise(falling))
        assert all(0 < rate <= 0.01 + slack for rate in rising)
        assert all(0.01 * final - slack <= rate <= 0.01 + slack for rate in falling)

    def test_no_update_is_wasted_at_a_rate_of_zero(self, tiny: MakeConfig) -> None:
        assert rates(tiny())[0] > 0

    def test_a_warm_up_as_long_as_the_recipe_ends_at_the_peak(self, tiny: MakeConfig) -> None:
        assert rates(tiny(training={"warmup_fraction": 1.0}))[-1] == 0.01

    def test_a_recipe_of_one_update_has_a_rate(self, tiny: MakeConfig) -> None:
        assert rates(tiny(training={"token_budget": 1})) == [pytest.approx(0.001)]


class TestWarmupStableDecay:
    """100 updates at a peak of 0.01, unless said otherwise."""

    @pytest.fixture
    def schedule(self, tiny: MakeConfig) -> Callable[..., list[float]]:
        def make(**settings: object) -> list[float]:
            return rates(tiny(training={"schedule": "warmup-stable-decay", **settings}))

        return make

    def test_rises_stays_and_falls_in_equal_steps(self, schedule: Callable[..., list[float]]) -> None:
        found = schedule(warmup_fraction=0.1, decay_fraction=0.2, final_fraction=0.5)
        assert found[:10] == pytest.approx([0.001 * step for step in range(1, 11)], rel=1e-12)
        assert found[9:80] == [0.01] * 71
        assert found[80:] == pytest.approx([0.01 - 0.00025 * step for step in range(1, 21)], rel=1e-12)
        assert found[-1] == 0.005

    @given(
        budget=st.integers(128, 10**5),
        warmup=st.integers(0, 100),
        decay=st.integers(1, 100),
        final=st.floats(0, 1),
    )
    def test_is_the_piecewise_linear_curve_through_its_four_corners(
        self, tiny: MakeConfig, budget: int, warmup: int, decay: int, final: float
    ) -> None:
        """Corners (0, 0), (w n, peak), ((1 - d) n, peak), (n, final x peak); the value at k is that of update k."""
        decay = min(decay, 100 - warmup)
        if decay == 0:
            warmup, decay = 99, 1
        config = with_training(
            tiny(),
            token_budget=budget,
            schedule="warmup-stable-decay",
            warmup_fraction=warmup / 100,
            decay_fraction=decay / 100,
            final_fraction=final,
        )
        total = total_updates(config)
        corners = [0.0, warmup / 100 * total, (1 - decay / 100) * total, float(total)]
        curve = np.interp(range(1, total + 1), corners, [0.0 if warmup else 0.01, 0.01, 0.01, 0.01 * final])
        np.testing.assert_allclose(rates(config), curve, rtol=1e-9, atol=1e-12)
        assert rates(config)[-1] == 0.01 * final
        assert learning_rate(config, total) == learning_rate(config, 10**9) == 0.01 * final

    @pytest.mark.parametrize(("warmup", "decay"), [(0.05, 0.2), (0.29, 0.71), (0.07, 0.57), (0.0, 0.123)])
    def test_reaches_the_peak_and_never_jumps(self, tiny: MakeConfig, warmup: float, decay: float) -> None:
        """No step is larger than a step of the steeper side, also where 0.29 x 100 is 28.999999999999996."""
        settings = {"schedule": "warmup-stable-decay", "warmup_fraction": warmup, "decay_fraction": decay}
        found = rates(tiny(training={**settings, "final_fraction": 0.0}))
        assert max(found) == pytest.approx(0.01, rel=1e-12)
        steepest = 0.01 / (100 * min(share for share in (warmup, decay) if share))
        assert all(abs(after - before) <= steepest * (1 + 1e-9) for before, after in itertools.pairwise(found))

    def test_without_warm_up_the_first_update_has_the_peak(self, schedule: Callable[..., list[float]]) -> None:
        assert schedule(warmup_fraction=0.0)[:80] == [0.01] * 80

    def test_a_decay_over_everything_is_a_straight_line(self, schedule: Callable[..., list[float]]) -> None:
        found = schedule(warmup_fraction=0.0, decay_fraction=1.0, final_fraction=0.0)
        assert found == pytest.approx([0.01 * (100 - step) / 100 for step in range(1, 101)], rel=1e-12, abs=1e-18)

    def test_no_decay_stays_at_the_peak(self, schedule: Callable[..., list[float]]) -> None:
        assert schedule(warmup_fraction=0.1, decay_fraction=0.0, final_fraction=1.0)[9:] == [0.01] * 91

    @pytest.mark.parametrize("decay", [0.01, 0.001, 1e-300])
    def test_a_decay_of_an_update_or_less_is_the_last_update(
        self, schedule: Callable[..., list[float]], decay: float
    ) -> None:
        found = schedule(warmup_fraction=0.0, decay_fraction=decay, final_fraction=0.1)
        assert found == [*[0.01] * 99, 0.01 * 0.1]

    def test_a_recipe_of_one_update_has_the_final_rate(self, schedule: Callable[..., list[float]]) -> None:
        assert schedule(token_budget=1) == [0.01 * 0.1]

    def test_max_updates_cuts_the_run_and_leaves_the_schedule(self, schedule: Callable[..., list[float]]) -> None:
        """A run cut before its decay is what a longer one goes on from, so it must not start to decay."""
        assert schedule(max_updates=50) == schedule()

    def test_differs_from_cosine_between_warm_up_and_end_only(self, schedule: Callable[..., list[float]]) -> None:
        found, cosine = schedule(), schedule(schedule="cosine")
        assert found[:5] == cosine[:5]
        assert found[-1] == cosine[-1]
        assert all(one > other for one, other in zip(found[5:-1], cosine[5:-1], strict=True))


class TestSoloConfig:
    """The training alone that a model of an unmixed pack equals."""

    VARIANTS = "packing.variants=[{seed: 0, weight_decay: 0}, {peak_learning_rate: 0.1, betas: [0, 0.5]}, {}]"

    def test_has_the_variants_settings_and_the_recipes_for_the_rest(self) -> None:
        settings = ["training.max_updates=9", "execution.micro_batch_size=4", "execution.packed_backward=at_once"]
        config = load("nano", ["packing.models=3", self.VARIANTS, *settings])
        own = [
            ["training.seed=0", "optimizer.weight_decay=0"],
            ["optimizer.peak_learning_rate=0.1", "optimizer.betas=[0, 0.5]"],
            [],
        ]
        for worker, overrides in enumerate(own):
            expected = load("nano", [*overrides, *settings[:2]])
            assert solo_config(config, worker) == expected
            assert solo_config(config, worker).recipe_identity == expected.recipe_identity

    def test_of_one_model_is_its_own(self) -> None:
        assert solo_config(load("nano"), 0) == load("nano")

    def test_takes_as_many_updates_at_the_same_share_of_the_peak(self) -> None:
        config = load("nano", ["packing.models=3", self.VARIANTS])
        alone = solo_config(config, 1)
        assert total_updates(alone) == total_updates(config)
        assert learning_rate(alone, 7) / 0.1 == pytest.approx(learning_rate(config, 7) / 0.004)

    def test_of_mixed_models_there_is_none(self) -> None:
        with pytest.raises(ValueError, match="4 mixed models are one training"):
            solo_config(load("packed4-20m-awc"), 0)

    @pytest.mark.parametrize("worker", [-1, 3])
    def test_there_is_one_for_each_model_alone(self, worker: int) -> None:
        with pytest.raises(ValueError, match=f"there is no model {worker} in a pack of 3"):
            solo_config(load("nano", ["packing.models=3"]), worker)


def test_mixed_models_make_the_updates_of_one_on_their_whole_batch() -> None:
    assert total_updates(load("packed8-20m-awc")) == total_updates(load("20m")) == 3113
