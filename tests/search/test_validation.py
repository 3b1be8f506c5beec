"""Whether a decision still holds: the order of the processes, what their records say of each claim, and failures."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from study_replay import fitted, record

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, Seconds, TrialRecord
from tinyllm_ray.search.answers import Finished, State, Trial, Wait
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.pairs import Verdict
from tinyllm_ray.search.validation import Answer, Claim, Outcome, Question, Validation, outcome_of

FIT = fitted()
BASELINE = make_candidate(1, FIT.baseline)
OTHER = make_candidate(4, FIT.settle({"sdpa_backend": "flash"}))
RATE = 1_000_000.0
PROCESS_SECONDS = 12.0
JITTER = (0.9995, 1.0004, 1.0001, 0.9998, 1.0003, 0.9999, 1.0002, 0.9996)
"""Of processes, one after the other."""


@dataclass
class Run:
    """A validation on a device where the other execution has `ratio` times the baseline's throughput."""

    ratio: float
    claim: Claim = "faster"
    noise: float = 1.0
    """Times the jitter."""
    fate: Callable[[Trial], Fate] = lambda trial: Fate.COMPLETE
    asked: list[Trial] = field(default_factory=list)
    elapsed: float = 0.0
    end: Finished | None = None

    def __post_init__(self) -> None:
        self.validation = Validation(FIT, Question(BASELINE, OTHER, self.claim))

    def go(self, budget: float = 200.0) -> Answer:
        while isinstance(trial := self.validation.ask(budget - self.elapsed), Trial):
            assert isinstance(self.validation.ask(budget - self.elapsed), Wait), "one at a time"
            self.asked.append(trial)
            self.elapsed += PROCESS_SECONDS
            self.validation.tell(self._record(trial))
        assert isinstance(trial, Finished)
        self.end = trial
        return self.validation.answer()

    def _record(self, trial: Trial) -> TrialRecord:
        assert trial.protocol is not None
        rate = RATE * (self.ratio if trial.candidate.execution == OTHER.execution else 1.0)
        rate *= 1 + (JITTER[len(self.asked) % len(JITTER)] - 1) * self.noise
        fate = self.fate(trial)
        seconds = Seconds(start=2.0, compile=3.0, warmup=1.0, windows=2.0, total=PROCESS_SECONDS)
        rates = (rate, rate * 1.0005, rate * 0.9995) if fate == Fate.COMPLETE else ()
        fields: dict[str, Any] = {"protocol": trial.protocol, "purpose": "verification", "round": trial.round}
        return record(trial.candidate, fate, rates, seconds=seconds, reason=None if rates else "why", **fields)


def sides(run: Run) -> str:
    return "".join("b" if trial.candidate.execution == BASELINE.execution else "o" for trial in run.asked)


def test_pairs_are_interleaved_and_end_with_the_third_that_tells() -> None:
    run = Run(1.08)
    answer = run.go(math.inf)
    assert sides(run) == "boobob"
    assert [trial.round for trial in run.asked] == [0, 0, 1, 1, 2, 2]
    assert [trial.candidate.id for trial in run.asked][:3] == [
        f"{BASELINE.id}-v1",
        f"{OTHER.id}-v1",
        f"{OTHER.id}-v2",
    ]
    assert {trial.stage for trial in run.asked} == {"verification"}
    assert answer.outcome == "holds"
    assert answer.verdict is not None
    assert answer.verdict.ratio == pytest.approx(1.08, rel=2e-3)
    assert answer.reason.startswith(f"{OTHER.id} is 1.0")
    assert "3 pairs of processes" in answer.reason


def test_an_answer_says_that_processes_differ_by_more_than_they_do_where_nothing_else_runs() -> None:
    assert "differ by" not in Run(1.08).go(math.inf).reason
    assert "; processes of " in Run(1.5, noise=200.0).go(math.inf).reason


def test_its_windows_are_short_and_its_tokens_the_studys() -> None:
    run = Run(1.08)
    run.go()
    for trial in run.asked:
        assert trial.protocol is not None
        assert trial.protocol.longest_seconds(0.02) < 3
        assert (trial.protocol.data_mode, trial.protocol.warmup_updates) == (
            FIT.protocol.data_mode,
            FIT.protocol.warmup_updates,
        )


def test_noise_asks_for_longer_windows_where_there_is_time() -> None:
    run = Run(1.02, noise=40.0)
    run.go(budget=600.0)
    lengths = [trial.protocol.least_seconds for trial in run.asked if trial.protocol]
    assert lengths[:2] == [0.0, 0.0]
    assert len(run.asked) > 6


@pytest.mark.parametrize(
    ("claim", "ratio", "outcome"),
    [
        ("faster", 1.05, "holds"),
        ("faster", 1.0, "no longer holds"),
        ("faster", 0.95, "no longer holds"),
        ("tie", 1.0, "holds"),
        ("tie", 1.05, "holds"),
        ("tie", 0.95, "no longer holds"),
        ("baseline", 0.95, "holds"),
        ("baseline", 1.0, "holds"),
        ("baseline", 1.05, "no longer holds"),
    ],
)
def test_each_claim_has_its_own_answer(claim: Claim, ratio: float, outcome: Outcome) -> None:
    assert Run(ratio, claim).go().outcome == outcome


@pytest.mark.parametrize(
    ("claim", "pairs", "outcome"),
    [
        ("faster", 3, "could not be told"),
        ("faster", 8, "could not be told"),
        ("tie", 3, "holds"),
        ("baseline", 3, "holds"),
        ("tie", 2, "could not be told"),
        ("baseline", 2, "could not be told"),
    ],
)
def test_what_stays_open_upholds_a_tie_and_shows_nothing_faster(claim: Claim, pairs: int, outcome: Outcome) -> None:
    assert outcome_of(Verdict(1.004, 0.99, 1.02, pairs, "open"), claim) == outcome


def test_three_pairs_fit_into_little_more_than_they_take() -> None:
    """A minute and a half has to do on a GPU, where a process takes twelve seconds; there is no share kept free."""
    run = Run(1.08)
    assert run.go(76.0).outcome == "holds"
    assert run.elapsed == 72.0


@pytest.mark.parametrize("budget", [60.0, 40.0])
def test_too_little_time_for_three_pairs_tells_nothing(budget: float) -> None:
    run = Run(1.5)
    answer = run.go(budget)
    assert answer.outcome == "could not be told"
    assert "and it takes 3 to tell" in answer.reason
    assert run.end is not None
    assert run.end.budget_exhausted
    assert run.elapsed <= budget


def test_nothing_starts_where_not_even_one_process_fits() -> None:
    run = Run(1.5)
    answer = run.go(5.0)
    assert (run.asked, answer.outcome, answer.verdict) == ([], "could not be told", None)
    assert answer.reason == "no pair was measured to its end"


def of(execution: dict[str, Any], fate: Fate, times: int = 99) -> Callable[[Trial], Fate]:
    """Processes of this execution end like this, so many times."""
    left = iter([fate] * times)
    return lambda trial: next(left, Fate.COMPLETE) if trial.candidate.execution == execution else Fate.COMPLETE


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.INVALID, Fate.OUT_OF_MEMORY])
def test_a_winner_that_cannot_be_used_no_longer_holds(fate: Fate) -> None:
    run = Run(1.5, fate=of(OTHER.execution, fate))
    answer = run.go()
    assert answer.outcome == "no longer holds"
    assert answer.reason == f"{OTHER.id} cannot be used here: {fate.value}: why"
    assert sides(run) == "boo", "tried twice, and no more"
    assert run.asked[-1].candidate.id == f"{OTHER.id}-v1-again"


@pytest.mark.parametrize("execution", [BASELINE.execution, OTHER.execution])
def test_processes_that_are_lost_tell_nothing(execution: dict[str, Any]) -> None:
    answer = Run(1.5, fate=of(execution, Fate.LOST)).go()
    assert answer.outcome == "could not be told"
    assert "is lost: why" in answer.reason


def test_a_baseline_that_fails_leaves_the_winner_without_a_comparison() -> None:
    answer = Run(1.5, fate=of(BASELINE.execution, Fate.FAILED)).go()
    assert answer.outcome == "could not be told"


def test_a_selected_baseline_holds_where_its_rival_cannot_be_used() -> None:
    assert Run(1.0, "baseline", fate=of(OTHER.execution, Fate.INVALID)).go().outcome == "holds"
    assert Run(1.0, "baseline", fate=of(BASELINE.execution, Fate.INVALID)).go().outcome == "no longer holds"


def test_one_failure_is_tried_again_and_costs_nothing_else() -> None:
    run = Run(1.08, fate=of(OTHER.execution, Fate.FAILED, times=1))
    assert run.go().outcome == "holds"
    assert sides(run) == "boo" + "obob"


def test_what_is_shown_are_its_processes() -> None:
    run = Run(1.08)
    run.go()
    trial = Validation(FIT, Question(BASELINE, OTHER, "faster")).ask(100)
    assert isinstance(trial, Trial)
    states = [(status.candidate.id, status.state) for status in run.validation.candidates()]
    assert states == [(trial.candidate.id, State.FINISHED) for trial in run.asked]
    assert run.validation.baseline().record is not None


def test_an_open_answer_takes_more_pairs_while_there_is_time() -> None:
    run = Run(1.004, noise=10.0)
    run.go(math.inf)
    assert len(run.asked) > 6
    assert isinstance(run.asked[0].protocol, Protocol)
