import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_replay import fitted

from tinyllm_ray.search.effects import (
    DEVICE_SD,
    MISFIT_SD,
    CompilePrior,
    EffectModel,
    MemoryPrior,
    Observation,
    ThroughputPrior,
)
from tinyllm_ray.search.priors import GH200, Priors, launch_bound
from tinyllm_ray.search.space import Space

SPACE = fitted(
    Space.model_validate(
        {
            "name": "effects",
            "baseline": {"update": "compiled"},
            "factors": {
                "micro_batch_size": [4, 8, 16, 32],
                "update": ["eager", "compiled", "graph"],
                "sdpa_backend": ["auto", "flash"],
                "loss_kernel": ["torch", "triton"],
                "norm_kernel": ["torch", "triton"],
            },
        }
    )
)
PRIOR = ThroughputPrior(Priors("cuda"), SPACE.baseline, SPACE.parameters)
ALL = list(SPACE.executions())


def settle(**changes: Any) -> dict[str, Any]:
    return SPACE.settle(changes)


def seen(value: float, noise: float = 0.003, device: str | None = None, **changes: Any) -> Observation:
    return Observation(settle(**changes), value, noise, device)


def predict(observations: list[Observation], *asked: dict[str, Any]) -> tuple[list[float], list[float]]:
    means, sds = EffectModel(PRIOR, SPACE.baseline, observations).predict(asked)
    return list(means), list(sds)


def test_without_observations_the_prior_speaks() -> None:
    means, sds = predict([], *ALL)
    assert means == pytest.approx([PRIOR.mean(execution) for execution in ALL])
    assert min(sds) >= PRIOR.level_sd


def test_what_was_measured_is_known_and_the_rest_is_not() -> None:
    (measured, other), (sure, unsure) = predict([seen(14.0)], settle(), settle(loss_kernel="triton"))
    assert measured == pytest.approx(14.0, abs=1e-3)
    assert sure < 0.005
    assert unsure > 0.03
    assert 14.0 < other < 14.1


def test_a_main_effect_carries_over_to_other_sizes_and_kinds() -> None:
    observations = [seen(14.0), seen(14.15, loss_kernel="triton")]
    for changes in ({"micro_batch_size": 16}, {"update": "graph"}, {"norm_kernel": "triton"}):
        (without, with_), _ = predict(observations, settle(**changes), settle(**changes, loss_kernel="triton"))
        assert with_ - without == pytest.approx(0.15, abs=0.03)


def test_an_interaction_shows_where_both_settings_meet_and_nowhere_else() -> None:
    apart = [seen(14.0), seen(14.0, loss_kernel="triton"), seen(14.0, norm_kernel="triton")]
    together = seen(14.1, loss_kernel="triton", norm_kernel="triton")
    asked = [
        settle(sdpa_backend="flash", loss_kernel=loss, norm_kernel=norm)
        for loss, norm in itertools.product(("torch", "triton"), repeat=2)
    ]
    (plain, loss, norm, both), _ = predict([*apart, together], *asked)
    assert both - plain > 0.05
    assert abs(loss - plain) < 0.035
    assert abs(norm - plain) < 0.035


def test_kinds_that_launch_alike_share_what_sizes_do_to_them() -> None:
    """A compiled update that loses half at 16 rows says little of what replays graphs there."""
    observations = [seen(14.0), seen(13.3, micro_batch_size=16)]
    (compiled, graph), _ = predict(
        observations, settle(micro_batch_size=8), settle(micro_batch_size=16, update="graph")
    )
    assert compiled < 13.2
    assert graph > 13.7


def test_sizes_walk_away_from_the_baseline() -> None:
    _, sds = predict([seen(14.0)], *(settle(micro_batch_size=size) for size in (32, 16, 8, 4)))
    assert sds == sorted(sds)
    assert sds[0] < sds[1] < sds[3]


def test_devices_have_effects_of_their_own() -> None:
    """The second device is 4% slower in everything; the kernel it alone ran is not."""
    observations = [
        seen(14.0, device="a"),
        seen(13.96, device="b"),
        seen(14.06, device="b", loss_kernel="triton"),
    ]
    (plain, kernel), _ = predict(observations, settle(), settle(loss_kernel="triton"))
    assert plain == pytest.approx(14.0, abs=0.01)
    assert kernel - plain == pytest.approx(0.1, abs=0.015)
    assert DEVICE_SD > 0.01


def test_noise_is_averaged() -> None:
    few, many = ([seen(14.0 + offset, 0.05) for offset in offsets] for offsets in ((0.0,), (-0.05, 0.05) * 8))
    (_,), (unsure,) = predict(few, settle())
    (mean,), (sure,) = predict(many, settle())
    assert sure < unsure / 2
    assert mean == pytest.approx(14.0, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(
    chosen=st.lists(st.sampled_from(ALL), min_size=1, max_size=12),
    values=st.lists(st.floats(-0.5, 0.5), min_size=12, max_size=12),
)
def test_any_observations_give_finite_predictions_that_never_know_less(chosen: Any, values: list[float]) -> None:
    observations = [Observation(one, 14.0 + value, 0.01) for one, value in zip(chosen, values, strict=False)]
    model = EffectModel(PRIOR, SPACE.baseline, observations)
    means, sds = model.predict(ALL)
    assert np.isfinite(means).all()
    assert (sds > 0).all()
    _, before = EffectModel(PRIOR, SPACE.baseline, observations[:-1]).predict(ALL)
    assert (sds <= before + 1e-6).all()
    alone = np.array([model.predict([one])[0][0] for one in ALL[:20]])
    assert alone == pytest.approx(means[:20]), "what else is asked changes nothing"


def test_planted_effects_are_recovered_from_a_quarter_of_the_space() -> None:
    rng = np.random.default_rng(1)

    def truth(execution: dict[str, Any]) -> float:
        log = 14.0 - 0.8 * (execution["update"] == "eager") + 0.02 * (execution["update"] == "graph")
        log += launch_bound(execution["micro_batch_size"], 5.0 if execution["update"] == "graph" else 16.0)
        log += 0.08 * (execution["loss_kernel"] == "triton") - 0.03 * (execution["norm_kernel"] == "triton")
        return log - 0.1 * (execution["sdpa_backend"] == "flash")

    places = rng.permutation(len(ALL))[: len(ALL) // 4]
    observations = [Observation(ALL[i], truth(ALL[i]) + rng.normal(0, 0.004), 0.004) for i in [0, *places]]
    means, sds = EffectModel(PRIOR, SPACE.baseline, observations).predict(ALL)
    errors = means - np.array([truth(one) for one in ALL])
    assert np.sqrt((errors**2).mean()) < 0.05
    assert (np.abs(errors) < 3 * sds + MISFIT_SD).mean() > 0.9


def test_priors_know_what_two_machines_showed_and_can_forget_one() -> None:
    every = Priors("cuda")
    mean, sd = every.effect(("kind", "eager"))
    assert -0.84 < mean < -0.71
    assert sd >= 0.08
    assert every.without("h200").effect(("kind", "eager"))[0] == GH200.effects["kind", "eager"]
    assert every.without("h200").effect(("kind", "eager"))[1] > sd
    assert every.without("gh200", "h200").effect(("kind", "eager")) == (-0.6, 0.3)
    assert Priors("cpu").effect(("kind", "default"))[0] > 0


@pytest.mark.parametrize(
    ("rows", "half", "expected"),
    [(4, 20.0, 126.6 / 640), (32, 20.0, 621.5 / 640), (8, 22.0, 701.6 / 2051), (32, 22.0, 1922.8 / 2051)],
)
def test_launches_bound_small_micro_batches_as_two_machines_show(rows: int, half: float, expected: float) -> None:
    assert math.exp(launch_bound(rows, half)) == pytest.approx(expected, rel=0.1)


def test_memory_grows_with_the_micro_batch_and_compilations_with_their_kind() -> None:
    memory = EffectModel(MemoryPrior(SPACE.baseline), SPACE.baseline, [seen(math.log(8e9))])
    (half, eager), _ = memory.predict([settle(micro_batch_size=16), settle(update="eager")])
    assert math.exp(half) == pytest.approx(4e9, rel=0.05)
    assert math.exp(eager) > 16e9
    compilations = EffectModel(CompilePrior(Priors("cuda")), SPACE.baseline, [seen(math.log(40.0))])
    (graph,), _ = compilations.predict([settle(update="graph")])
    assert 25 < math.exp(graph) < 45
