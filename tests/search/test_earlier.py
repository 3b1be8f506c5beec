"""What a study of one size says to the next: as far as it was measured, as far as sizes are alike, and no further."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_replay import fitted, record

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, Memory, Seconds, TrialRecord
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.earlier import OWN, EarlierStudy, Origin, alike
from tinyllm_ray.search.effects import EffectModel, Observation, ThroughputPrior
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.observed import carried_rates
from tinyllm_ray.search.outlook import Outlook
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.space import Space
from tinyllm_ray.search.study import Study

SPACE = fitted(
    Space.model_validate(
        {
            "name": "sizes",
            "baseline": {"update": "compiled"},
            "factors": {
                "micro_batch_size": [8, 16, 32],
                "update": ["eager", "compiled", "graph"],
                "sdpa_backend": ["auto", "flash"],
                "loss_kernel": ["torch", "triton"],
                "norm_kernel": ["torch", "triton"],
            },
        }
    )
)
PRIORS = Priors("cuda").without("h200")  # which knows the kernels
PRIOR = ThroughputPrior(PRIORS, SPACE.baseline, SPACE.parameters)
SMALLER = Origin(1, math.log(0.5))
LOSS, NORM = {"loss_kernel": "triton"}, {"norm_kernel": "triton"}


def at(value: float, origin: Origin = OWN, **changes: Any) -> Observation:
    return Observation(SPACE.settle(changes), value, 0.003, origin=origin)


def effect(observations: list[Observation], **changes: Any) -> tuple[float, float]:
    """Expected gain of changes over the baseline, and the standard deviation of their own figure."""
    model = EffectModel(PRIOR, SPACE.baseline, observations)
    means, sds = model.predict([SPACE.baseline, SPACE.settle(changes)])
    return float(means[1] - means[0]), float(sds[1])


def measured(rate: float, fate: Fate = Fate.COMPLETE, changes: dict[str, Any] | None = None, **more: Any) -> Any:
    return record(make_candidate(1, SPACE.settle(changes or {})), fate, (rate,) * 3 if rate else (), **more)


def earlier(*records: TrialRecord, parameters: int = SPACE.parameters // 2) -> EarlierStudy:
    return EarlierStudy.of(parameters, SPACE.targets_per_update, records)


def test_what_a_setting_did_to_one_size_is_expected_of_the_next() -> None:
    own = [at(14.0)]
    there = [at(14.7, SMALLER), at(14.9, SMALLER, **LOSS)]
    alone, alone_sd = effect(own, **LOSS)
    carried, carried_sd = effect(own + there, **LOSS)
    assert alone < 0.1
    assert 0.14 < carried < 0.2, "most of what it was there"
    assert carried_sd < 0.8 * alone_sd, "and less uncertain"
    measured_sd = effect([*own, at(14.12, **LOSS)], **LOSS)[1]
    assert carried_sd > 2 * measured_sd, "but not as if it had been measured here"


def test_what_was_not_measured_there_stays_as_open_as_it_was() -> None:
    own = [at(14.0)]
    there = [at(14.7, SMALLER), at(14.82, SMALLER, **LOSS)]
    assert effect(own + there, **NORM) == pytest.approx(effect(own, **NORM), abs=0.003)


def test_what_two_settings_do_together_carries_over() -> None:
    """Each alone gains a little and both lose: a model that took over single effects would expect the sum."""
    there = [at(14.0, SMALLER), at(14.03, SMALLER, **LOSS), at(14.03, SMALLER, **NORM)]
    both = LOSS | NORM
    without = effect([at(14.0), *there], **both)[0]
    assert without > 0.04
    assert effect([at(14.0), *there, at(13.97, SMALLER, **both)], **both)[0] < without - 0.03


def test_a_size_further_away_says_less() -> None:
    own = [at(14.0)]

    def carried(times: float) -> tuple[float, float]:
        there = Origin(1, math.log(times))
        return effect([*own, at(14.7, there), at(14.85, there, **LOSS)], **LOSS)

    gains, sds = zip(*(carried(times) for times in (0.9, 0.4, 0.05)), strict=True)
    assert gains[0] > gains[1] > gains[2] > effect(own, **LOSS)[0]
    assert sds[0] < sds[1] < sds[2] < effect(own, **LOSS)[1]


def test_a_studys_own_record_outweighs_the_earlier_ones() -> None:
    there = [at(14.7, SMALLER), at(14.85, SMALLER, **LOSS)]
    gain, _ = effect([at(14.0), at(13.92, **LOSS), *there], **LOSS)
    assert gain == pytest.approx(-0.08, abs=0.01)


def test_earlier_records_count_less_where_own_ones_contradict_them() -> None:
    """The kernels' gains there are losses here; what is said of a third setting is then doubted, too."""
    flash = {"sdpa_backend": "flash"}
    there = [at(14.7, SMALLER), at(14.8, SMALLER, **LOSS), at(14.8, SMALLER, **NORM), at(14.8, SMALLER, **flash)]
    agree = effect([at(14.0), at(14.1, **LOSS), at(14.1, **NORM), *there], **flash)
    differ = effect([at(14.0), at(13.8, **LOSS), at(13.8, **NORM), *there], **flash)
    assert differ[0] < agree[0] - 0.01
    assert differ[1] > 1.2 * agree[1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.floats(-4, 4)), max_size=12), st.sampled_from([0.9, 0.6, 0.3]))
def test_correlations_of_studies_are_correlations(found: list[tuple[int, float]], another: float) -> None:
    sizes = dict(found)
    origins = [OWN, *(Origin(study, sizes[study]) for study, _ in found)]
    matrix = alike(origins, origins, another)
    assert matrix == pytest.approx(matrix.T)
    assert np.diag(matrix) == pytest.approx(1.0)
    assert np.linalg.eigvalsh(matrix).min() > -1e-9


def test_a_rate_is_carried_as_its_distance_from_what_was_expected_there() -> None:
    """A small model waits for launches at small micro-batches: that is its size's doing and expected, not learned."""
    small = SPACE.parameters // 8
    there = ThroughputPrior(Priors("cuda"), SPACE.baseline, small)
    few = SPACE.settle({"micro_batch_size": 8})
    as_expected = [
        record(make_candidate(1, execution), rates=(math.exp(there.mean(execution) + 0.1),) * 3)
        for execution in (SPACE.baseline, few)
    ]
    priors = Priors("cuda", earlier=(earlier(*as_expected, parameters=small),))
    here = ThroughputPrior(priors, SPACE.baseline, SPACE.parameters)
    base, other = (seen.value - here.mean(seen.execution) for seen in carried_rates(here))
    assert base == pytest.approx(other), "neither is faster than the other for its size"
    assert there.mean(SPACE.baseline) - there.mean(few) > PRIOR.mean(SPACE.baseline) - PRIOR.mean(few) + 0.1


def test_a_verifications_records_stay_out() -> None:
    again = measured(1.9e6).model_copy(update={"purpose": "verification"})
    assert earlier(measured(1.9e6), again).records == (measured(1.9e6),)


def test_seconds_of_starts_and_compilations_are_those_of_this_machine() -> None:
    slow = Seconds(start=5.0, compile=61.0, warmup=1.0, windows=1.0, total=70.0)
    study = earlier(measured(1.9e6, seconds=slow), measured(1.9e6, changes={"cpu_threads": 4}, seconds=slow))
    work = SPACE.parameters * SPACE.targets_per_update

    def predict(*records: TrialRecord) -> Any:
        return CostModel("cuda", work, Protocol(), records, Priors("cuda", earlier=(study,))).predict(SPACE.baseline)

    assert predict().start.expected == 5.0
    assert predict().compile.expected == pytest.approx(61, rel=0.2), "of 20 s that other machines took"
    assert predict().rest.expected == 2.0
    quick = Seconds(start=1.0, compile=15.0, warmup=1.0, windows=1.0, total=20.0)
    assert predict(measured(1.9e6, changes=LOSS, seconds=quick)).start.expected == 1.0


def test_a_model_of_another_size_is_expected_to_run_as_fast_for_its_size() -> None:
    study = earlier(measured(8e6), parameters=SPACE.parameters // 2)
    priors = Priors("cuda", earlier=(study,))
    assert priors.work_per_second("compiled") == 4e6 * SPACE.parameters
    assert priors.work_per_second("eager") == Priors("cuda").work_per_second("eager"), "nothing was measured of it"


def prospects(*studies: EarlierStudy) -> dict[str, float]:
    """Expected gains after the baseline, by label, where one setting differs."""
    base = measured(
        1.9e6,
        seconds=Seconds(start=1.0, compile=20.0, total=40.0),
        memory=Memory(peak_reserved_bytes=5 * 10**10, total_bytes=10**11),
    )
    priors = Priors("cuda", earlier=studies)
    work = SPACE.parameters * SPACE.targets_per_update
    cost = CostModel("cuda", work, Protocol(), (base,), priors)
    outlook = Outlook(SPACE, Objective("training", 4e8, 100), cost, priors)
    asked = {name: SPACE.settle(changes) for name, changes in {"loss": LOSS, "norm": NORM}.items()}
    return {one.identity: one.gain for one in outlook.prospects(asked)}


def test_a_setting_that_broke_another_size_is_tried_late_and_one_that_only_ran_out_of_time_is_not() -> None:
    plain = prospects()
    failed = prospects(earlier(measured(0, Fate.FAILED, LOSS)))
    assert failed["loss"] < 0.5 * plain["loss"]
    assert failed["norm"] == pytest.approx(plain["norm"])
    cut = prospects(earlier(measured(0, Fate.TIMED_OUT, LOSS), measured(0, Fate.LOST, LOSS)))
    assert cut == pytest.approx(plain)


def test_what_needed_too_much_memory_at_another_size_is_not_expected_to_fit_here() -> None:
    def there(peak: float) -> EarlierStudy:
        memories = [Memory(peak_reserved_bytes=int(size), total_bytes=10**11) for size in (5e9, peak)]
        return earlier(measured(3.8e6, memory=memories[0]), measured(3.8e6, changes=LOSS, memory=memories[1]))

    assert prospects(there(2e10))["loss"] < 0.2 * prospects(there(4e9))["loss"]


def test_a_study_begins_with_its_baseline_whatever_others_showed() -> None:
    study = Study(SPACE, priors=Priors("cuda", earlier=(earlier(measured(1e6), measured(5e6, changes=LOSS)),)))
    answer = study.ask(math.inf)
    assert answer.stage == "baseline"  # type: ignore[union-attr]
    assert study.selection() is None, "and has no answer of its own before it has measured"
