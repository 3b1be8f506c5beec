import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_replay import fitted, record

from tinyllm_ray.records import Fate, Seconds, TrialRecord
from tinyllm_ray.search.account import Account, account
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.cost import CostModel, Starts
from tinyllm_ray.search.objective import Objective, winners
from tinyllm_ray.search.verdict import select

SPACE = fitted()
STARTS = Starts(start=1.0, cold=20.0, warm=4.0)


def measured(number: int, speed: float, cold: float, fate: Fate = Fate.COMPLETE, **settings: object) -> TrialRecord:
    candidate = make_candidate(number, SPACE.settle({"micro_batch_size": 32, **settings}))
    rates = (0.999 * speed, speed, 1.001 * speed)
    return record(candidate, fate, rates=rates, seconds=Seconds(start=1.0, compile=cold, total=cold + 9.0))


EAGER = measured(1, 6e5, 0.6, update="eager")
COMPILED = measured(2, 1.26e6, 18.0)
TUNED = measured(3, 1.275e6, 129.0, compile_mode="max-autotune")
COST = CostModel("cuda", SPACE.parameters * SPACE.targets_per_update, SPACE.protocol, (EAGER, COMPILED, TUNED))


def test_compilation_counts_cold_once_and_every_run_starts_warm() -> None:
    assert Objective("training", 1e6, 1).seconds(STARTS, 1e6) == pytest.approx(1 + 20 + 1)
    assert Objective("training", 1e6, 10).seconds(STARTS, 1e6) == pytest.approx(16 + 10 * (1 + 4 + 1))
    assert Objective("training", 1e6, 10, evaluation_seconds=3).seconds(STARTS, 1e6) == pytest.approx(16 + 10 * 9)


def test_throughput_knows_no_starts() -> None:
    slow_start = Starts(start=1.0, cold=500.0, warm=400.0)
    assert Objective().value(slow_start, 2e6) < Objective().value(STARTS, 1e6)


@pytest.mark.parametrize(("tokens", "best"), [(10_000_000, EAGER), (100_000_000, COMPILED), (1_000_000_000, COMPILED)])
def test_the_winner_goes_by_the_number_of_targets(tokens: int, best: TrialRecord) -> None:
    (winner,) = winners([EAGER, COMPILED, TUNED], COST.starts, tokens=[tokens])
    assert winner.record is best


def test_max_autotune_pays_after_ten_billion_targets_as_the_reference_found() -> None:
    """111 s more of compilation for 1.2% of 1.26 M targets/s: 11.5 billion."""
    (before, after) = winners([COMPILED, TUNED], COST.starts, tokens=[10**10, 13 * 10**9])
    assert before.record is COMPILED
    assert after.record is TUNED
    assert [winner.record for winner in winners([COMPILED, TUNED], COST.starts, runs=240, tokens=[10**8])] == [TUNED]


def test_winners_are_shown_beside_the_baseline_where_it_has_a_figure() -> None:
    (winner,) = winners([EAGER, COMPILED], COST.starts, 10, [10**9], baseline=EAGER.execution_identity)
    assert winner.record is COMPILED
    assert winner.baseline_seconds == pytest.approx(
        Objective("training", 10**9, 10).seconds(COST.starts(EAGER.execution), 6e5)
    )
    (winner,) = winners([COMPILED], COST.starts, 10, [10**9], baseline=EAGER.execution_identity)
    assert winner.baseline_seconds is None


def test_records_that_are_not_complete_win_nothing() -> None:
    assert winners([measured(9, 9e9, 1.0, Fate.INVALID)], COST.starts) == []
    assert winners([], COST.starts) == []


@given(tokens=st.integers(10**5, 10**12), runs=st.integers(1, 1000))
def test_no_record_beats_the_winner(tokens: int, runs: int) -> None:
    objective = Objective("training", tokens, runs)
    (winner,) = winners([EAGER, COMPILED, TUNED], COST.starts, runs, [tokens])
    for other in (EAGER, COMPILED, TUNED):
        assert winner.seconds <= objective.seconds(COST.starts(other.execution), other.targets_per_second or 0.0)


def test_the_verdict_goes_by_the_objective() -> None:
    for objective, best in [
        (Objective(), TUNED),
        (Objective("training", 10**7), EAGER),
        (Objective("training", 10**9), COMPILED),
        (Objective("training", 10**9, 240), TUNED),
    ]:
        verdict = select([EAGER, COMPILED, TUNED], None, objective, COST.starts)
        assert verdict is not None
        assert verdict.record is best, objective
    assert select([EAGER, COMPILED], None, Objective("training", 10**9), COST.starts).reason.startswith(  # type: ignore[union-attr]
        "soonest done with 1 run of 1,000,000,000 targets"
    )


def test_a_tie_in_seconds_is_one_in_throughput() -> None:
    """0.05% apart with windows 0.2% apart; other kernels, the same start."""
    close = measured(4, 1.2606e6, 18.0, sdpa_backend="cudnn")
    verdict = select([COMPILED, close], COMPILED.execution_identity, Objective("training", 10**9, 240), COST.starts)
    assert verdict is not None
    assert verdict.record is COMPILED
    assert verdict.ties == (close,)


def test_of_a_tie_the_one_that_others_speak_for_is_taken() -> None:
    lucky, likely = measured(4, 1.2606e6, 18.0, sdpa_backend="cudnn"), measured(5, 1.26e6, 18.0, sdpa_backend="flash")
    verdict = select([lucky, likely], expected=lambda one: 1.0 if one is likely else 0.0)
    assert verdict is not None
    assert verdict.record is likely
    assert "speaks for it" in verdict.reason
    assert select([lucky, likely]).record is lucky  # type: ignore[union-attr]


def test_an_account_counts_what_was_spent_and_when_it_pays_back() -> None:
    objective = Objective("training", 4e8, 240)
    spent = account([EAGER, COMPILED, TUNED], EAGER, COMPILED, objective, COST.starts)
    assert spent is not None
    assert spent.spent_seconds == pytest.approx(0.6 + 18 + 129 + 27)
    assert spent.pays_back_after_runs == 1
    assert spent.saved_seconds == pytest.approx(240 * (4e8 / 6e5 - 4e8 / 1.26e6), rel=0.02)
    assert (
        str(spent) == f"spent 175 s and saves {spent.saved_seconds:,.0f} s over 240 planned runs, paid back after 1 run"
    )
    back = account([EAGER, COMPILED], COMPILED, EAGER, objective, COST.starts)
    assert back is not None
    assert back.pays_back_after_runs is None
    once = account([EAGER, COMPILED], COMPILED, EAGER, Objective("training", 1e7, 1), COST.starts)
    assert once is not None
    assert once.saved_seconds > 5
    assert str(once).endswith(
        f" and saves {once.saved_seconds:.0f} s over the planned run, which more runs do not pay back"
    )
    assert "saves -" not in str(Account(9.6, -3.0, 7, 1))
    assert str(Account(9.6, 0.0, None, 1)) == "spent 10 s and found nothing that saves any against the baseline"
    assert account([EAGER], EAGER, EAGER, Objective(), COST.starts) is None
