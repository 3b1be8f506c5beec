"""Which of a study's trials go by count and which by time and need, and what the latter are stopped for."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from study_replay import Replay, fitted, gh200, record
from study_replay import replay as replayed
from test_study import MANY, ONCE, take

from tinyllm_ray.measure.band import CHECKED_UPDATES
from tinyllm_ray.measure.need import CONFIDENCE
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, Seconds, TrialRecord
from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.noise import NoiseOfWindows, bar_of, record_bounds
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.repeat import Repeat
from tinyllm_ray.search.space import SearchWindows
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verdict import THROUGHPUT
from tinyllm_ray.search.verifier import InterleavedPairs

FIT = fitted()
BY_COUNT, BY_NEED = FIT.protocol, FIT.search_protocol


def study(objective: Objective = MANY, search_windows: SearchWindows = "by_need", **more: object) -> Study:
    fit = replace(FIT, search_windows=search_windows)
    return Study(fit, objective=objective, verifier=InterleavedPairs(), priors=Priors("cuda"), **more)  # type: ignore[arg-type]


def protocols(done: Replay) -> dict[str, set[Protocol]]:
    found: dict[str, set[Protocol]] = {}
    for trial in done.trials:
        found.setdefault(trial.stage, set()).add(trial.protocol or done.study.protocol)
    return found


def measured(trial: Trial, rate: float, cold: float, fate: Fate = Fate.COMPLETE, start: float = 1.0) -> TrialRecord:
    rates = (0.999 * rate, rate, 1.001 * rate)
    return record(trial.candidate, fate, rates, seconds=Seconds(start=start, compile=cold, total=cold + 9.0))


def test_baseline_and_finalists_go_by_count_and_what_the_search_tries_by_need() -> None:
    assert protocols(replayed(study())) == {
        "baseline": {BY_COUNT},
        "eager": {BY_NEED},
        "search": {BY_NEED},
        "verification": {BY_COUNT},
    }
    assert BY_NEED.version == "adaptive"
    assert BY_NEED.windows == BY_COUNT.windows
    assert BY_NEED.least_updates == CHECKED_UPDATES[-1] < BY_COUNT.counted_updates


def test_no_more_updates_are_needed_than_by_count() -> None:
    short = replace(FIT, protocol=Protocol(windows=2, updates_per_window=5))
    assert short.search_protocol.least_updates == 10


def test_everything_goes_by_count_where_that_is_asked_for_and_by_need_where_the_protocol_does() -> None:
    assert set().union(*protocols(replayed(study(search_windows="by_count"))).values()) == {BY_COUNT}
    adaptive = Protocol(version="adaptive", windows=4)
    assert set().union(*protocols(replayed(study(protocol=adaptive))).values()) == {adaptive}


def searching(objective: Objective = THROUGHPUT, **more: object) -> Iterator[tuple[Study, Trial]]:
    """A study at each of its trials, up to the first of the search."""
    asked = study(objective, **more)  # type: ignore[arg-type]
    while (trial := take(asked)).stage != "search":
        yield asked, trial
        asked.tell(gh200(trial))
    yield asked, trial


def test_only_what_the_search_tries_is_stopped_and_for_less_than_the_best_is_sure_of() -> None:
    *before, (asked, trial) = searching()
    assert [one.stage for _, one in before] == ["baseline", "eager"]
    assert all(asked.bar(one).targets_per_second is None for _, one in before)
    incumbent = asked.incumbent()
    assert incumbent is not None
    noise = NoiseOfWindows(asked._cost.records)
    bounds = record_bounds(incumbent, CAUTIOUS_SPREAD, CONFIDENCE, noise.of_record(incumbent))
    assert bounds is not None
    assert asked.bar(trial) == bar_of(incumbent, CAUTIOUS_SPREAD, noise=noise)
    assert asked.bar(trial).targets_per_second == bounds.low < bounds.rate
    *_, (by_count, last) = searching(search_windows="by_count")
    assert by_count.bar(last).targets_per_second is None


def test_what_starts_sooner_may_be_slower_by_what_that_saves() -> None:
    """The baseline takes 200 s to compile: a training of 1 M targets/s is then done sooner without."""
    asked = study(ONCE)
    for cold, rate in ((200.0, 1.2e6), (1.0, 5e5)):
        asked.tell(measured(take(asked), rate, cold))
    quick, slow = (
        FIT.settle({"update": "eager", "micro_batch_size": 16}),
        FIT.settle({"compile_mode": "max-autotune"}),
    )
    known, baseline = asked._cost.records, asked.incumbent()
    low = bar_of(baseline, CAUTIOUS_SPREAD, noise=NoiseOfWindows(known)).targets_per_second
    assert baseline is not None
    assert low is not None
    bars = [asked._compared.bar(one, asked._cost.starts, known, 0.5) for one in (quick, slow)]
    starts = asked._cost.starts
    quickest = ONCE.targets / (ONCE.seconds(starts(baseline.execution), low) - ONCE.fixed_seconds(starts(quick)))
    assert bars[0].targets_per_second == pytest.approx(quickest)
    assert quickest < 0.8 * low
    assert bars[1].targets_per_second == low, "what starts later has no more to reach: others may train for longer"


def test_one_that_cannot_win_is_none_of_the_choices_and_is_not_tried_again() -> None:
    def outcome(trial: Trial) -> TrialRecord:
        done = gh200(trial)
        return done.model_copy(update={"fate": Fate.DOMINATED}) if trial.stage == "search" else done

    done = replayed(study(), outcome)
    assert Fate.DOMINATED in {one.fate for one in done.records}
    assert done.study.selection().record.execution == FIT.baseline  # type: ignore[union-attr]
    searched = [one.execution_identity for one in done.records if one.purpose == "search"]
    assert len(searched) == len(set(searched))


def test_a_candidate_that_is_measured_once_more_is_measured_to_its_end() -> None:
    done = replayed(study(), most=4)
    records = [*done.records[:-1], done.records[-1].model_copy(update={"fate": Fate.DOMINATED, "reason": "slow"})]
    again = Repeat(FIT, records, records[-1].execution_identity, MANY)
    trial = again.ask(1e6)
    assert isinstance(trial, Trial)
    assert (trial.stage, trial.protocol) == ("search", BY_NEED)
    assert again.bar(trial).targets_per_second is None


def test_windows_by_need_are_expected_to_be_as_many_as_they_were() -> None:
    def expected(*records: TrialRecord) -> float:
        cost = CostModel("cuda", FIT.parameters * FIT.targets_per_update, BY_COUNT, tuple(records), Priors("cuda"))
        return cost.predict(FIT.baseline, protocol=any_updates).windows.expected

    any_updates = BY_NEED.model_copy(update={"least_updates": 0})
    base = study()
    first = gh200(take(base))
    short = [first.model_copy(update={"protocol": any_updates, "windows": first.windows[:1]}) for _ in range(50)]
    other = [one.model_copy(update={"protocol": Protocol(version="adaptive", windows=1)}) for one in short]
    assert 0.5 < expected(first, *short) < 0.6 * 2
    assert expected(first) == expected(first, *other) > 6 * 0.5
    assert math.isclose(expected(first), 8 * (0.5 + (first.seconds_per_update or 0)), rel_tol=1e-6)


def test_windows_by_need_take_no_longer_than_by_count_but_for_the_last() -> None:
    quick, slow = Protocol(version="adaptive", updates_per_window=5), Protocol(version="adaptive")
    assert quick.longest_seconds(0.3) == pytest.approx(15 * 0.3 + 0.8)
    assert slow.longest_seconds(0.3) == pytest.approx(12 * 0.8)
    assert slow.counted_seconds(0.3) > 12 * 0.8
    assert quick.longest_seconds(0.01) == pytest.approx(3 * 0.51), "half a second each, at least"
