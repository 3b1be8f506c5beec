"""What a study keeps for its verification is what the verification wants to begin."""

from dataclasses import replace

import pytest
from study_replay import fitted, record, replay

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.search.answers import Finished, Trial
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.paired import PairedVerifier, Rounds
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verdict import Selection
from tinyllm_ray.search.verifier import MARGIN

SPACE = fitted()


@pytest.mark.parametrize("share", [0.5, 1.0, 4.0], ids=["too little", "short pairs", "whole pairs"])
@pytest.mark.parametrize("total", [9.0, 30.0])
def test_the_seconds_kept_are_enough_to_begin_and_no_fewer_are(share: float, total: float) -> None:
    seconds = {"start": 0.5, "compile": 2.0, "warmup": 0.5, "windows": total - 4.0, "total": total}
    eager = record(make_candidate(2, SPACE.settle({"update": "eager"})), rates=(1e6,) * 3, seconds=seconds)
    base = record(make_candidate(1, SPACE.baseline), rates=(1.9e6,) * 3, seconds=seconds)
    cost = CostModel("cuda", SPACE.parameters * SPACE.targets_per_update, SPACE.protocol, (base, eager), Priors("cuda"))
    least = PairedVerifier(SPACE.protocol, 1e9).seconds(cost, eager.execution, base.execution)
    short = next(
        most
        for most in range(1, 2000)
        if PairedVerifier(SPACE.protocol, most).seconds(cost, eager.execution, base.execution)
    )
    verifier = PairedVerifier(SPACE.protocol, share * short)
    kept = verifier.seconds(cost, eager.execution, base.execution)
    assert (kept > 0) == (share >= 1)
    assert kept <= max(least, short)
    if kept:
        rounds = verifier.begin(Selection(eager, (), ""), base, (), cost)
        assert not isinstance(rounds.ask(kept), Finished)
    again = verifier.begin(Selection(eager, (), ""), base, (), cost).ask(0.9 * short - 1)
    assert isinstance(again, Finished)
    assert again.reason.startswith("budget: 3 pairs of processes need up to ")


def test_where_one_can_be_verified_it_is_the_fastest_and_not_what_starts_soonest() -> None:
    """On a noisy machine the search chooses the cheapest of a wide tie, and what that is worth is known."""
    seconds = {"start": 0.5, "compile": 2.0, "warmup": 0.5, "windows": 9.0, "total": 12.0}
    found = {
        name: record(
            make_candidate(number, SPACE.settle(changes)), rates=(rate, 0.9 * rate, 1.1 * rate), seconds=seconds
        )
        for number, (name, rate, changes) in enumerate(
            [("base", 1.0e6, {}), ("soon", 1.0e6, {"update": "eager"}), ("fast", 1.08e6, {"micro_batch_size": 16})], 1
        )
    }
    work = SPACE.parameters * SPACE.targets_per_update
    cost = CostModel("cuda", work, SPACE.protocol, tuple(found.values()), Priors("cuda"))
    short = PairedVerifier(SPACE.protocol, 100.0, Objective("training", 1e6, 1))
    rounds = short.begin(Selection(found["soon"], (found["fast"],), ""), found["base"], (), cost)
    assert rounds.verification.finalists == [found["fast"].execution_identity]


@pytest.mark.parametrize(("tokens", "update"), [(1e7, "eager"), (1e9, "compiled")])
def test_what_is_verified_is_selected_by_the_objective(tokens: float, update: str) -> None:
    """One short training: eager updates take twice as long, and are done before a compilation would be."""
    objective = Objective("training", tokens, 1)
    verifier, priors = PairedVerifier(SPACE.protocol, 1e9, objective), Priors("cuda").without("gh200")
    study = replay(Study(SPACE, objective=objective, verifier=verifier, priors=priors)).study
    assert study.verified() is not None or update == "compiled", "the baseline itself needs no verification"
    chosen, spent = study.selection(), study.account()
    assert chosen is not None
    assert chosen.record.execution["update"] == update
    assert ("takes longer for its starts than its speed saves" in chosen.reason) == (update == "eager")
    assert spent is not None
    assert (spent.saved_seconds > 5) == (update == "eager")


def test_time_is_kept_for_the_fastest_where_the_search_chooses_what_starts_sooner() -> None:
    """Verification begins with the fastest, whose processes compile; time for eager ones would not do."""
    eager, compiled = {"start": 0.5, "compile": 0.5, "total": 1.5}, {"start": 0.5, "compile": 30.0, "total": 31.0}
    soon = record(make_candidate(1, SPACE.settle({"update": "eager"})), rates=(1.0e6, 0.9e6, 1.1e6), seconds=eager)
    fast = record(
        make_candidate(2, SPACE.settle({"update": "compiled"})), rates=(1e6, 0.92e6, 1.12e6), seconds=compiled
    )
    fit = replace(SPACE, baseline=soon.execution, protocol=Protocol(windows=3, updates_per_window=10))
    verifier, priors = PairedVerifier(fit.protocol, 1e9), Priors("cuda")
    study = Study(
        fit, records=(soon, fast.model_copy(update={"targets_per_second": 1.02e6})), verifier=verifier, priors=priors
    )
    chosen, fastest = study.selection(), study.incumbent()
    assert chosen is not None
    assert fastest is not None
    assert (chosen.record.candidate, fastest.candidate) == (soon.candidate, fast.candidate)
    wanted = verifier.seconds(study._cost, fastest.execution, soon.execution)
    assert wanted > MARGIN * verifier.seconds(study._cost, soon.execution, soon.execution)
    assert study._reserve(soon.execution) >= wanted


def test_the_search_keeps_the_time_of_pairs_with_what_ties_with_the_baseline() -> None:
    """A baseline that wins a wide tie for its start is verified beside the fastest of it, as any choice would be."""
    quick, slow = {"start": 0.5, "compile": 0.5, "total": 1.5}, {"start": 0.5, "compile": 9.0, "total": 20.0}
    soon = record(make_candidate(1, SPACE.settle({"update": "eager"})), rates=(1.0e6, 0.9e6, 1.1e6), seconds=quick)
    fast = record(make_candidate(2, SPACE.settle({"update": "compiled"})), rates=(1.08e6, 0.98e6, 1.18e6), seconds=slow)
    fit = replace(SPACE, baseline=soon.execution, protocol=Protocol(windows=3, updates_per_window=10))
    verifier = PairedVerifier(fit.protocol, 1e9)

    def asked(seconds: float) -> Study:
        study = Study(fit, records=(soon, fast), verifier=verifier, priors=Priors("cuda"))
        chosen = study.selection()
        assert chosen is not None
        assert chosen.record.candidate == soon.candidate
        answer = study.ask(seconds)
        assert isinstance(answer, Trial)
        return study

    ample = asked(1e9)
    enough, least = ample._reserve(fast.execution), verifier.seconds(ample._cost, fast.execution, soon.execution)
    assert ample.verification is None, "with time for both the search goes on"
    begun = asked(enough).verification
    assert isinstance(begun, Rounds)
    assert begun.verification.finalists == [fast.execution_identity]
    assert asked(0.9 * least).verification is None, "what cannot be verified any more keeps nothing from the search"
