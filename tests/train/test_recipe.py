"""Budgets, epochs and the schedule, as arithmetic."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.config import Config, load
from tinyllm_ray.sections import TrainingConfig
from tinyllm_ray.train.recipe import epoch_ends, learning_rate, run_updates, total_updates, updates_after_epoch

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
        base = tiny()
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
