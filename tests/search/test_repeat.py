"""One candidate of a study measured again: whose record counts, what the two figures say, and a resumption after it."""

import math
from typing import Any

import pytest
from study_replay import GH200_SPACE, fitted, gh200, record, replay

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.answers import Finished, State, Trial, Wait
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.repeat import Difference, Repeat, difference
from tinyllm_ray.search.retry import retried
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verdict import Selection
from tinyllm_ray.search.verified import Verified

FIT = fitted()
SEARCHED = replay(Study(FIT), most=6).records
"""Of a study that was cut after six candidates, without verification."""


def repeat(records: list[TrialRecord], of: TrialRecord, **options: Any) -> Repeat:
    return Repeat(FIT, records, of.execution_identity, Objective(), **options)


def measured(study: Repeat, fate: Fate = Fate.COMPLETE, factor: float = 1.0, **fields: Any) -> TrialRecord:
    """Ask for the one process and tell a record of it, `factor` times as fast as the one before."""
    trial = study.ask(1000)
    assert isinstance(trial, Trial)
    purpose = "repeat" if trial.stage == "repeat" else "search"
    rates = tuple(window.targets_per_second * factor for window in study.before.windows) or (1e6, 1e6)
    if fate != Fate.COMPLETE:
        rates = ()
    done = record(trial.candidate, fate, rates, purpose=purpose, reason=None if rates else "why", **fields)
    study.tell(done)
    return done


def chosen(study: Study) -> Selection:
    found = study.selection()
    assert found is not None
    return found


def slowest() -> TrialRecord:
    return min(SEARCHED, key=lambda one: one.targets_per_second or math.inf)


@pytest.mark.parametrize("factor", [0.5, 10.0])
def test_a_repeat_of_a_figure_replaces_nothing_however_lucky(factor: float) -> None:
    before = Study(FIT, records=SEARCHED)
    study = repeat(SEARCHED, slowest())
    done = measured(study, factor=factor)
    assert study.is_repeat
    assert (done.purpose, done.candidate) == ("repeat", f"{slowest().candidate}-r1")
    assert chosen(study) == chosen(before)
    assert study.incumbent() == before.incumbent()


def test_a_resumption_goes_on_as_if_there_were_no_repeat() -> None:
    done = measured(repeat(SEARCHED, slowest()), factor=10.0)
    one, other = Study(FIT, records=SEARCHED), Study(FIT, records=[*SEARCHED, done])
    assert other.measured_again == [done]
    assert other.ask(10_000) == one.ask(10_000)


def test_repeats_are_numbered_and_shown_beside_what_they_repeat() -> None:
    study = repeat(SEARCHED, SEARCHED[0])
    trial = study.ask(1000)
    assert isinstance(trial, Trial)
    running = [status for status in study.candidates() if status.state == State.RUNNING]
    assert [status.candidate.id for status in running] == [trial.candidate.id]
    assert [status.state for status in study.candidates() if status.candidate.id == SEARCHED[0].candidate] == [
        State.FINISHED
    ]
    first = record(trial.candidate, rates=(1e6, 1e6), purpose="repeat")
    study.tell(first)
    second = repeat([*SEARCHED, first], SEARCHED[0]).ask(1000)
    assert isinstance(second, Trial)
    assert second.candidate.id == f"{SEARCHED[0].candidate}-r2"
    assert second.candidate.label.endswith(" again")


def test_it_is_measured_as_it_was() -> None:
    protocol = FIT.protocol.model_copy(update={"windows": 7})
    records = [SEARCHED[0].model_copy(update={"protocol": protocol}), *SEARCHED[1:]]
    trial = repeat(records, records[0]).ask(1000)
    assert isinstance(trial, Trial)
    assert trial.protocol == protocol
    assert trial.candidate.execution == records[0].execution


def failing(fate: Fate, number: int = 3) -> list[TrialRecord]:
    """The search's records, one of which has no figure."""
    bad = SEARCHED[number].model_copy(update={"fate": fate, "targets_per_second": None, "windows": [], "reason": "why"})
    return [*SEARCHED[:number], bad, *SEARCHED[number + 1 :]]


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate != Fate.COMPLETE])
def test_a_candidate_without_a_figure_gets_one_that_counts(fate: Fate) -> None:
    records = failing(fate)
    study = repeat(records, records[3])
    done = measured(study, factor=1.0)
    assert not study.is_repeat
    assert (done.purpose, done.candidate) == ("search", records[3].candidate)
    (status,) = (status for status in study.candidates() if status.candidate.id == done.candidate)
    assert (status.state, status.fate, status.record) == (State.FINISHED, Fate.COMPLETE, done)
    resumed = Study(FIT, records=[*records, done])
    assert chosen(resumed) == chosen(study)
    assert done.execution_identity not in {
        one.candidate.execution_identity for one in replay(resumed, most=30).trials
    }, "not measured a third time"


def test_while_it_runs_the_failed_one_is_shown_running_and_once() -> None:
    records = failing(Fate.FAILED)
    study = repeat(records, records[3])
    assert isinstance(study.ask(1000), Trial)
    states = [status.state for status in study.candidates() if status.candidate.id == records[3].candidate]
    assert states == [State.RUNNING]
    assert isinstance(study.ask(1000), Wait)


def test_one_that_fails_again_is_as_it_was() -> None:
    records = failing(Fate.FAILED)
    study = repeat(records, records[3])
    before = chosen(study)
    measured(study, Fate.FAILED)
    assert chosen(study) == before
    assert study.difference is None
    assert isinstance(study.ask(1000), Finished)


def test_it_is_not_started_where_it_is_not_expected_to_fit() -> None:
    answer = repeat(SEARCHED, SEARCHED[0]).ask(3)
    assert isinstance(answer, Finished)
    assert answer.budget_exhausted
    assert answer.reason.startswith(f"budget: {SEARCHED[0].candidate} needs about ")


def test_what_was_verified_stays_verified() -> None:
    """Before, while and after: the rerun's report must not fall back to what the search alone said."""
    verifier = PairedVerifier(FIT.protocol, most_seconds=400)
    space = GH200_SPACE.model_copy(update={"factors": {"micro_batch_size": (8, 16, 32)}, "when": {}})
    fit = fitted(space.model_copy(update={"baseline": space.baseline.model_copy(update={"micro_batch_size": 8})}))
    done = replay(
        Study(fit, verifier=verifier),
        lambda trial: gh200(trial).model_copy(update={"protocol": trial.protocol or fit.protocol}),
    )
    found = done.study.verified()
    assert found is not None
    assert found.speedup is not None
    study = Repeat(fit, done.records, done.records[0].execution_identity, Objective(), verifier)
    before, repeated = study.verified(), measured(study, factor=0.5)
    for again in (before, study.verified()):
        assert isinstance(again, Verified)
        assert again.speedup is not None
        assert (again.selected, again.speedup.pairs) == (found.selected, found.speedup.pairs)
        assert again.speedup.ratio == pytest.approx(found.speedup.ratio)
    assert chosen(study).record == found.selected
    resumed = replay(Study(fit, records=[*done.records, repeated], verifier=verifier))
    assert (resumed.trials, resumed.study.verified()) == ([], study.verified()), "as a resumption has it"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.996, "0.4% slower: within the noise ("),
        (0.7, "30.0% slower: more than the noise ("),
        (1.5, "50.0% faster: m"),
    ],
)
def test_two_figures_are_compared_with_the_noise_of_the_study(factor: float, words: str) -> None:
    study = repeat(SEARCHED, SEARCHED[0])
    measured(study, factor=factor)
    found = study.difference
    assert found is not None
    assert found.ratio == pytest.approx(factor)
    assert str(found).startswith(words)
    assert 0.005 < found.noise < 0.05


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Difference(0.9888, 0.0108), "1.12% slower: more than the noise (1.07%)"),
        (Difference(1.0112, 0.0108), "1.12% faster: more than the noise (1.08%)"),
        # 1/1.1 of the first one's speed is as far off as 1.1 times that.
        (Difference(0.905, 0.1), "9.5% slower: more than the noise (9.1%)"),
        (Difference(0.915, 0.1), "8.5% slower: within the noise (9.1%)"),
    ],
)
def test_a_difference_and_the_noise_it_exceeds_never_look_alike(found: Difference, words: str) -> None:
    assert str(found) == words


def test_a_repeat_far_off_does_not_make_the_noise_it_is_judged_by() -> None:
    near, far = (
        difference(SEARCHED[0], record(make_candidate(1, SEARCHED[0].execution), rates=rates), SEARCHED)
        for rates in ((1.26e6, 1.26e6), (0.2e6, 0.2e6))
    )
    assert near is not None
    assert far is not None
    assert near.noise == pytest.approx(far.noise)
    assert near.within_noise
    assert not far.within_noise


def test_noise_is_the_same_both_ways() -> None:
    assert Difference(1 / 1.02, 0.0201).within_noise
    assert Difference(1.02, 0.0201).within_noise
    assert not Difference(1.02, 0.0199).within_noise


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.INVALID, Fate.OUT_OF_MEMORY])
def test_a_study_that_goes_on_may_measure_again_what_failed(fate: Fate) -> None:
    records = failing(fate, 1)
    kept, open_again = Study(FIT, records=records), Study(FIT, records=retried(records, {fate}))
    name = records[1].candidate
    assert {status.candidate.id: status.state for status in kept.candidates()}[name] == State.FINISHED
    assert {status.candidate.id: status.fate for status in open_again.candidates()}[name] == Fate.LOST
    again = [trial.candidate for trial in replay(open_again, gh200).trials]
    assert name in [candidate.id for candidate in again], "under the name it had"
    assert name not in [trial.candidate.id for trial in replay(kept, gh200).trials]


def test_what_is_retried_is_named_by_its_fate_and_of_the_search_alone() -> None:
    repeats = [one.model_copy(update={"purpose": "repeat", "fate": Fate.FAILED}) for one in SEARCHED[:1]]
    records = [*failing(Fate.FAILED), *repeats]
    assert retried(records, {Fate.INVALID}) == records
    assert [one.fate for one in retried(records, {Fate.FAILED})].count(Fate.LOST) == 1
