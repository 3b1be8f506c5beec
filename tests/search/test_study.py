import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from study_replay import GH200_SPACE, fates, fitted, gh200, recipe, record, replay
from test_fitting import space, spaces

from tinyllm_ray.config import identity, load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Fate, KernelTime, TrialRecord
from tinyllm_ray.search.answers import Finished, State, Trial, Wait
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.outlook import Outlook
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.ruled_out import HOPELESS_TRIALS, out_of_memory
from tinyllm_ray.search.settled import MEASURED_AGAIN
from tinyllm_ray.search.space import Space, load_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import InterleavedPairs

RECIPE = 408_070_400
ONCE, MANY = Objective("training", RECIPE, 1), Objective("training", RECIPE, 240)
UNSEEN = Priors("cuda").without("gh200")
"""For replays of the GH200's table."""

KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel")
KERNEL_SPACE = Space.model_validate(
    {
        "name": "kernels",
        "baseline": {"update": "compiled"},
        "factors": {
            "micro_batch_size": [8, 16, 32],
            "update": ["eager", "compiled", "graph"],
            "sdpa_backend": ["auto", "flash"],
            **{kernel: ["torch", "triton"] for kernel in KERNELS},
        },
    }
)


def study(records: Any = (), objective: Objective = MANY, fit: FittedSpace | None = None, **more: Any) -> Study:
    return Study(fit or fitted(), records=records, objective=objective, priors=UNSEEN, **more)


def take(asked: Study) -> Trial:
    answer = asked.ask(1e6)
    assert isinstance(answer, Trial), answer
    return answer


def states(asked: Study) -> dict[str, State]:
    return {status.candidate.label: status.state for status in asked.candidates()}


def reasons(asked: Study) -> dict[str, str]:
    return {status.candidate.label: status.reason or "" for status in asked.candidates()}


def made_up(rate: Callable[[dict[str, Any]], float], fate: Callable[[dict[str, Any]], Fate] | None = None) -> Any:
    """An outcome by formula: targets/s of an execution, its windows 0.2% apart; 30 s each, 14 s once compiled."""

    def outcome(trial: Trial) -> TrialRecord:
        execution = trial.candidate.execution
        ended = fate(execution) if fate else Fate.COMPLETE
        speed = rate(execution)
        rates = (0.998 * speed, speed, 1.002 * speed) if ended in {Fate.COMPLETE, Fate.DOMINATED} else ()
        first = 4.0 if trial.stage == "verification" else 20.0
        seconds = {"start": 1.0, "compile": first, "warmup": 1.0, "windows": 7.0, "total": first + 10.0}
        return record(trial.candidate, ended, rates=rates, seconds=seconds)

    return outcome


# The order


def test_the_baseline_comes_first_and_alone_then_the_eager_row() -> None:
    asked = study()
    baseline = take(asked)
    assert (baseline.stage, baseline.candidate.label) == ("baseline", "mb32 compiled default auto t8")
    assert isinstance(asked.ask(1e6), Wait)
    asked.tell(gh200(baseline))
    eager = take(asked)
    assert (eager.stage, eager.candidate.label) == ("eager", "mb32 eager auto t8")
    assert take(asked).stage == "search", "the search does not wait for the eager row"


def test_one_run_of_the_reference_recipe_is_not_worth_a_search() -> None:
    """1% of 323 s is less than any compilation and its verification take."""
    done = replay(study(objective=ONCE, verifier=InterleavedPairs()))
    assert [trial.stage for trial in done.trials] == ["baseline", "eager"]
    assert done.finished is not None
    assert not done.finished.budget_exhausted
    assert done.finished.reason.startswith("nothing left is expected to save more than it takes to measure; spent 35 s")


def test_the_reference_run_is_searched_for_many_runs_in_less_than_half_the_space() -> None:
    done = replay(study())
    best = done.study.selection()
    assert best is not None
    assert best.record.execution["micro_batch_size"] == 32
    assert (best.record.targets_per_second or 0) > 1.25e6
    assert len(done.trials) < len(list(fitted().executions())) / 2


def test_small_micro_batches_of_operators_are_not_measured_where_the_larger_is_far_ahead() -> None:
    labels = replay(study()).labels
    assert not any(label.startswith(("mb4 eager", "mb8 eager", "mb4 compiled default")) for label in labels)


def test_thread_counts_are_for_candidates_that_wait_for_the_host() -> None:
    labels = replay(study()).labels
    assert not any(label.endswith(("t1", "t4")) for label in labels if label.startswith("mb32 compiled"))


def kernels_fill(share: float, base: float = 0.02) -> list[TrialRecord]:
    """The baseline, and its kernels' share of an update."""
    trial = take(study())
    kernel = KernelTime(name="k", category="matmul", milliseconds=1000 * share * base, launches=1)
    rates = (32768 / base,) * 3
    return [record(trial.candidate, rates=rates, kernels=[kernel], seconds_per_update=base)]


@pytest.mark.parametrize(("share", "asked"), [(0.5, True), (0.99, False)])
def test_kernels_that_leave_gaps_make_a_candidate_pay_for_thread_counts(share: float, asked: bool) -> None:
    going_on = study(kernels_fill(share))
    outlook = Outlook(going_on.space, MANY, going_on._cost, UNSEEN)
    assert outlook.host_bound(going_on.space.baseline) == asked
    names = [one["cpu_threads"] for one in going_on._open(outlook).values() if one["update"] == "compiled"]
    default = [one for one in going_on._open(outlook).values() if one["compile_mode"] == "default"]
    assert names
    assert any(one["cpu_threads"] == 1 and one["micro_batch_size"] == 32 for one in default) == asked


# Planted structures


def planted(execution: dict[str, Any]) -> float:
    """Kernels add up, a graph helps small micro-batches."""
    log = math.log(1.5e6) - (0.8 if execution["update"] == "eager" else 0.0)
    log -= math.log1p(((4 if execution["update"] == "graph" else 18) / execution["micro_batch_size"]) ** 3) / 3
    log += sum(gain * (execution[name] == "triton") for name, gain in zip(KERNELS, (0.06, -0.04, 0.03), strict=True))
    return math.exp(log - 0.05 * (execution["sdpa_backend"] == "flash"))


def best_of(fit: FittedSpace, rate: Callable[[dict[str, Any]], float]) -> float:
    return max(rate(execution) for execution in fit.executions())


def test_planted_main_effects_are_found_in_a_fifth_of_the_space() -> None:
    fit = fitted(KERNEL_SPACE)
    done = replay(study(fit=fit), made_up(planted))
    best = done.study.selection()
    assert best is not None
    assert planted(best.record.execution) > 0.995 * best_of(fit, planted)
    assert len(done.trials) < len(list(fit.executions())) / 5


def test_a_planted_interaction_is_found() -> None:
    """Two kernels lose 4% each alone and gain 15% together."""

    def rate(execution: dict[str, Any]) -> float:
        loss, norm = (execution[name] == "triton" for name in KERNELS[:2])
        together = 0.15 if loss and norm else -0.04 * (loss + norm)
        neutral = execution | dict.fromkeys(KERNELS, "torch")
        return planted(neutral) * math.exp(together)

    fit = fitted(KERNEL_SPACE)
    best = replay(study(fit=fit), made_up(rate)).study.selection()
    assert best is not None
    assert rate(best.record.execution) > 0.99 * best_of(fit, rate)


def test_a_setting_that_fails_is_left_alone_after_a_few_tries() -> None:
    def fate(execution: dict[str, Any]) -> Fate:
        return Fate.INVALID if execution["rotary_kernel"] == "triton" else Fate.COMPLETE

    fit = fitted(KERNEL_SPACE)
    done = replay(study(fit=fit), made_up(planted, fate))
    failed = [one for one in done.records if one.fate == Fate.INVALID]
    assert 1 <= len(failed) <= 4
    best = done.study.selection()
    assert best is not None
    assert planted(best.record.execution) > 0.97 * best_of(fit, planted)


def test_a_large_space_is_searched_around_the_best() -> None:
    """46,080 executions; the climb goes through kernels that each gain a little."""
    wide = KERNEL_SPACE.model_dump()
    more = ("activation_kernel", "optimizer_kernel")
    wide["factors"] |= {name: ["torch", "triton"] for name in more} | {"prefetch_depth": [0, 1, 2, 3]}
    wide["factors"] |= {"cpu_threads": [1, 2, 4, 8], "residual_dtype": ["float32", "bfloat16"]}
    wide["factors"] |= {"recompute_activations": [False, True]}

    def rate(execution: dict[str, Any]) -> float:
        gain = 0.03 * sum(execution[name] == "triton" for name in more) - 0.2 * execution["recompute_activations"]
        return planted(execution) * math.exp(gain)

    done = replay(study(fit=fitted(Space.model_validate(wide))), made_up(rate), budget=1200)
    best = done.study.selection()
    assert best is not None
    assert {best.record.execution[name] for name in more} == {"triton"}
    assert rate(best.record.execution) > 1.1 * rate(fitted().baseline)


# Memory


def test_out_of_memory_rules_out_larger_sizes_of_its_kind_and_what_saves_less() -> None:
    fit = fit_space(load_space("execution"), recipe(128, 1024), "cuda", 16)
    base = {**fit.baseline, "micro_batch_size": 64, "loss_kernel": "triton"}
    failed = record(take(study(fit=fit)).candidate, Fate.OUT_OF_MEMORY).model_copy(update={"execution": base})

    def ruled_out(**changes: Any) -> bool:
        return out_of_memory({**base, **changes}, [failed]) is not None

    assert ruled_out(micro_batch_size=128)
    assert ruled_out(cpu_threads=1)
    assert ruled_out(loss_kernel="torch")
    assert ruled_out(loss_kernel="torch", micro_batch_size=128)
    assert not ruled_out(micro_batch_size=32)
    assert not ruled_out(loss_kernel="torch", micro_batch_size=32)
    assert not ruled_out(recompute_activations=True)
    assert not ruled_out(sdpa_backend="flash")
    assert not ruled_out(update="graph")


def test_a_size_that_ran_out_of_memory_is_never_exceeded() -> None:
    fit = fit_space(load_space("execution"), recipe(128, 1024), "cuda", 16)

    def fate(execution: dict[str, Any]) -> Fate:
        return Fate.OUT_OF_MEMORY if execution["micro_batch_size"] > 32 else Fate.COMPLETE

    done = replay(study(fit=fit), made_up(lambda one: 1e6 + one["micro_batch_size"], fate))
    for number, trial in enumerate(done.trials):
        assert out_of_memory(trial.candidate.execution, done.records[:number]) is None


def test_an_eager_row_that_cannot_fit_is_skipped_with_the_reason() -> None:
    asked = study()
    asked.tell(gh200(take(asked)))
    eager = take(asked)
    asked.tell(record(eager.candidate, Fate.OUT_OF_MEMORY))
    assert asked.eager_row().fate == Fate.OUT_OF_MEMORY


# Budgets


@pytest.mark.parametrize("budget", [0, 10, 41, 60, 80, 100, 150, 200, 300, 400, 600, 900])
@pytest.mark.parametrize("workers", [1, 3])
def test_no_budget_is_exceeded_when_costs_are_as_predicted(budget: int, workers: int) -> None:
    def seconds(trial: Trial, _: TrialRecord) -> float:
        # The baseline takes its chance as soon as its expected seconds fit.
        prediction = trial.prediction
        return prediction.expected_seconds if trial.stage == "baseline" else prediction.upper_seconds

    done = replay(study(), budget=budget, workers=workers, seconds=seconds)
    assert done.elapsed <= budget
    assert done.finished is not None
    assert done.finished.budget_exhausted == (State.NOT_STARTED in states(done.study).values())


@pytest.mark.parametrize("budget", range(0, 800, 50))
def test_no_budget_is_exceeded_by_what_the_reference_took(budget: int) -> None:
    done = replay(study(), budget=budget)
    assert done.elapsed <= budget


def test_a_budget_too_small_for_the_baseline_starts_nothing() -> None:
    asked = study()
    answer = asked.ask(20.7)
    assert isinstance(answer, Finished)
    assert answer.budget_exhausted
    assert answer.reason.startswith("budget: the baseline needs about ")
    assert answer.reason.endswith(" s and 20 s are left")
    assert set(states(asked).values()) == {State.NOT_STARTED}
    needed, *rest = reasons(asked).values()
    assert needed.startswith("it needs about ")
    assert set(rest) == {"the baseline comes first, and did not fit"}
    assert asked.ask(-5) == Finished(answer.reason.replace("20 s are", "0 s are"), budget_exhausted=True)


def test_what_did_not_fit_once_may_fit_later() -> None:
    asked = study()
    assert isinstance(asked.ask(10), Finished)
    take(asked)
    assert list(states(asked).values()) == [State.RUNNING, State.PENDING]


def test_what_would_pay_but_does_not_fit_is_shown() -> None:
    first = replay(study(), stop_after=2)
    done = replay(study(first.records), budget=12)
    assert done.trials == []
    assert done.finished is not None
    assert done.finished.reason.startswith("budget: the next candidate needs up to ")
    assert list(states(done.study).values()).count(State.NOT_STARTED) > 0


def test_no_more_is_said_to_be_kept_for_verification_than_is_left() -> None:
    fit = fitted(KERNEL_SPACE)
    first = replay(study(fit=fit), made_up(planted), stop_after=2)
    answer = study(first.records, fit=fit, verifier=InterleavedPairs()).ask(12)
    assert isinstance(answer, Finished)
    assert " s and 12 s are left; " in answer.reason


def test_time_is_kept_for_verification() -> None:
    """A study that keeps none searches longer; one that does ends with all its pairs inside the budget."""
    fit = fitted(KERNEL_SPACE)
    without, kept = (
        replay(study(fit=fit, verifier=verifier), made_up(planted), budget=420)
        for verifier in (None, InterleavedPairs())
    )
    assert [trial.stage for trial in kept.trials].count("verification") == 6
    assert kept.elapsed <= 420
    searched = [[trial.stage for trial in done.trials].count("search") for done in (without, kept)]
    assert searched[0] > searched[1] > 0


def test_a_choice_that_cannot_be_verified_is_better_than_none() -> None:
    """With nothing to verify yet, a candidate is measured in the time that would be kept for that."""
    fit = fitted(KERNEL_SPACE)
    whole = replay(study(fit=fit), made_up(planted), stop_after=2)
    resumed = study(whole.records, fit=fit, verifier=InterleavedPairs())
    done = replay(resumed, made_up(planted), budget=100)
    chosen = done.study.selection()
    assert chosen is not None
    assert chosen.record.execution != fit.baseline
    assert done.elapsed <= 100
    first = done.trials[0].prediction
    reserved = InterleavedPairs().seconds(resumed._cost, done.trials[0].candidate.execution, fit.baseline)
    assert first.upper_seconds + reserved > 100


def test_no_time_is_kept_for_comparing_with_a_baseline_that_failed() -> None:
    outcome = fates({"mb32 compiled default auto": Fate.FAILED})
    done = replay(study(verifier=InterleavedPairs()), outcome, budget=130)
    reserved = InterleavedPairs().seconds(done.study._cost, done.study.space.baseline, done.study.space.baseline)
    first = next(trial for trial in done.trials if trial.stage == "search")
    assert first.prediction.upper_seconds + reserved > 110, "both would not have fitted"
    chosen = done.study.selection()
    assert chosen is not None
    assert chosen.record.execution["update"] == "compiled"
    assert done.elapsed <= 130


@pytest.mark.parametrize(("share", "state"), [(1.05, State.RUNNING), (0.95, State.NOT_STARTED)])
def test_after_a_baseline_that_failed_another_may_take_the_chance_as_well(share: float, state: State) -> None:
    """No answer is worse than one that is cut."""
    asked = study(verifier=InterleavedPairs())
    asked.tell(record(take(asked).candidate, Fate.FAILED))
    prediction = asked._prediction(asked.eager_row().candidate.execution)
    left = share * prediction.expected_seconds
    assert left < prediction.upper_seconds
    answer = asked.ask(left)
    assert asked.eager_row().state == state
    if state == State.NOT_STARTED:
        assert isinstance(answer, Finished)
        assert answer.reason.startswith("budget: the next candidate needs about ")


# Verification


def test_the_choice_and_the_baseline_are_measured_again_in_turned_pairs() -> None:
    fit = fitted(KERNEL_SPACE)
    done = replay(study(fit=fit, verifier=InterleavedPairs()), made_up(planted))
    again = [trial for trial in done.trials if trial.stage == "verification"]
    chosen = done.study.selection()
    assert chosen is not None
    roles = ["c" if trial.candidate.execution == chosen.record.execution else "b" for trial in again]
    assert roles == ["c", "b", "b", "c", "c", "b"]
    assert [trial.candidate.id[-3:] for trial in again] == [f"-v{number}" for number in range(1, 7)]
    assert [one.execution_identity for one in done.study.measured_again] == [
        trial.candidate.execution_identity for trial in again
    ]
    assert done.trials[-6:] == again, "after the search, one at a time"
    assert {status.candidate.id for status in done.study.candidates()} >= {trial.candidate.id for trial in again}


def test_a_baseline_that_stays_needs_no_verification() -> None:
    done = replay(study(objective=ONCE, verifier=InterleavedPairs()))
    assert done.study.measured_again == []


@pytest.mark.parametrize("length", [0, 1, 4, 9, 17, 24, 28])
def test_verification_goes_on_from_its_records(length: int) -> None:
    fit = fitted(KERNEL_SPACE)
    whole = replay(study(fit=fit, verifier=InterleavedPairs()), made_up(planted))
    rest = replay(study(whole.records[:length], fit=fit, verifier=InterleavedPairs()), made_up(planted))
    assert [trial.candidate.id for trial in rest.trials] == [trial.candidate.id for trial in whole.trials[length:]]
    assert rest.study.selection() == whole.study.selection()


# Fates


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.INVALID, Fate.TIMED_OUT, Fate.LOST, Fate.OUT_OF_MEMORY])
def test_a_baseline_without_a_result_is_reported_and_the_study_goes_on(fate: Fate) -> None:
    done = replay(study(), fates({"mb32 compiled default auto": fate}))
    tries = 2 if fate == Fate.LOST else 1
    assert done.labels[: tries + 1] == ["mb32 compiled default auto t8"] * tries + ["mb32 eager auto t8"]
    assert len(done.labels) > 3
    status = done.study.baseline()
    assert (status.state, status.fate, status.reason) == (State.FINISHED, fate, f"made {fate}")
    verdict = done.study.selection()
    assert verdict is not None
    assert verdict.record.fate == Fate.COMPLETE


def test_everything_failing_ends_soon_and_with_no_verdict() -> None:
    done = replay(study(), lambda trial: record(trial.candidate, Fate.FAILED))
    assert len(done.records) <= HOPELESS_TRIALS
    assert done.finished is not None
    assert done.study.selection() is None


@pytest.mark.parametrize("objective", [Objective(), ONCE, MANY], ids=["throughput", "once", "many"])
def test_where_all_but_the_baseline_are_invalid_the_baseline_is_the_answer(objective: Objective) -> None:
    """The eager row too, and however fast they were: three times the baseline here."""

    def outcome(trial: Trial) -> TrialRecord:
        if trial.stage == "baseline":
            return made_up(lambda _: 1e6)(trial)
        liar = made_up(lambda _: 3e6)(trial)
        return liar.model_copy(update={"fate": Fate.INVALID, "reason": "its losses leave the band"})

    done = replay(study(objective=objective, verifier=InterleavedPairs()), outcome, budget=2700)
    found = done.study.selection()
    assert found is not None
    assert found.record.execution == done.study.space.baseline
    assert found.ties == ()
    assert done.study.versus_baseline(found.record) == 1.0
    eager = done.study.eager_row()
    assert (eager.state, eager.fate, eager.reason) == (State.FINISHED, Fate.INVALID, "its losses leave the band")
    assert {winner.record.candidate for winner in done.study.winners()} == {found.record.candidate}
    assert len(done.records) < 20, "what fails again and again is given up"
    assert {trial.stage for trial in done.trials} <= {"baseline", "eager", "search"}, "there is nothing to verify"


def test_a_dominated_trial_teaches_and_never_wins() -> None:
    def outcome(trial: Trial) -> TrialRecord:
        is_baseline = trial.stage == "baseline"
        return gh200(trial).model_copy(update={"fate": Fate.COMPLETE if is_baseline else Fate.DOMINATED})

    done = replay(study(), outcome)
    verdict = done.study.selection()
    assert verdict is not None
    assert verdict.record.candidate.startswith("c01")


def test_a_complete_record_without_a_number_is_shown_as_invalid() -> None:
    asked = study()
    asked.tell(record(take(asked).candidate))
    status = asked.baseline()
    assert (status.state, status.fate) == (State.FINISHED, Fate.INVALID)
    assert status.reason == "it reported None targets/s, which cannot be compared"
    assert asked.incumbent() is None


def test_a_record_of_no_running_trial_is_a_bug() -> None:
    asked = study()
    trial = take(asked)
    asked.tell(gh200(trial))
    with pytest.raises(AssertionError, match="is not running"):
        asked.tell(gh200(trial))


# Several at once


@pytest.mark.parametrize("workers", [2, 4])
def test_several_trials_at_once_measure_different_things_and_end_as_well(workers: int) -> None:
    fit = fitted(KERNEL_SPACE)
    done = replay(study(fit=fit), made_up(planted), workers=workers)
    assert len({trial.candidate.execution_identity for trial in done.trials}) == len(done.trials)
    best = done.study.selection()
    assert best is not None
    assert planted(best.record.execution) > 0.995 * best_of(fit, planted)
    assert done.elapsed < replay(study(fit=fit), made_up(planted)).elapsed


def test_what_runs_counts_as_measured_with_what_is_expected_of_it() -> None:
    """Or a second worker would ask for the next of kin of the same thing."""
    asked = study(fit=fitted(KERNEL_SPACE))
    asked.tell(made_up(planted)(take(asked)))
    # Flash attention is not expected to gain, so that what it may gain all comes from what is not known of it.
    kin = asked.space.settle({"sdpa_backend": "flash"})
    executions = [asked.space.settle({"sdpa_backend": "flash", "update": "graph"})]
    alone, beside = (
        Outlook(asked.space, MANY, asked._cost, UNSEEN, others).prospects({"kin": kin})[0]
        for others in ([], executions)
    )
    assert beside.gain < 0.9 * alone.gain


def test_a_slow_device_is_no_fault_of_its_candidates() -> None:
    """The same executions on a device 5% slower: the kernel's gain is seen all the same."""
    fit = fitted(KERNEL_SPACE)
    asked = study(fit=fit)

    def on(device: str, settings: dict[str, Any], factor: float) -> TrialRecord:
        candidate = asked._candidates.register(fit.settle(settings))
        speed = factor * 1.5e6 * (1.06 if settings.get("loss_kernel") else 1.0)
        place = Device(kind="cuda", name="GPU", identifier=device, host="node")
        return record(candidate, rates=(speed, speed, speed), devices=[place])

    records = [on("a", {}, 1.0), on("b", {}, 0.95), on("b", {"loss_kernel": "triton"}, 0.95)]
    for one in records:
        asked._learn(one)
    outlook = Outlook(fit, MANY, asked._cost, UNSEEN)
    both = outlook.expected_rates([fit.baseline, fit.settle({"loss_kernel": "triton"})])
    assert both[1] - both[0] > 0.04


# Any space


def random_outcome(seed: int, chosen: list[Fate]) -> Callable[[Trial], TrialRecord]:
    """The same candidate always ends the same way, however the study came to it."""

    def outcome(trial: Trial) -> TrialRecord:
        dice = random.Random(f"{seed} {trial.candidate.execution_identity}")
        fate = dice.choice(chosen)
        rates = tuple(dice.uniform(90, 110) for _ in range(3)) if fate == Fate.COMPLETE else ()
        return record(trial.candidate, fate, rates=rates)

    return outcome


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=spaces(),
    rows=st.sampled_from([6, 8, 48]),
    kind=st.sampled_from(["cuda", "cpu"]),
    seed=st.integers(0, 99),
    workers=st.integers(1, 4),
    objective=st.sampled_from([Objective(), MANY]),
)
def test_a_study_of_any_space_measures_each_execution_once_and_ends(
    asked: Space, rows: int, kind: Any, seed: int, workers: int, objective: Objective
) -> None:
    try:
        fit = fit_space(asked, recipe(rows), kind, 4)
    except ConfigError:
        return
    going = Study(fit, objective=objective)
    done = replay(going, random_outcome(seed, [Fate.COMPLETE] * 4 + list(Fate)), workers=workers, most=25)
    assert done.finished is not None or len(done.trials) >= 25
    executions = [trial.candidate.execution for trial in done.trials]
    assert executions[0] == fit.baseline
    lost = {one.execution_identity for one in done.records if one.fate == Fate.LOST}
    tried = Counter(identity(execution) for execution in executions)
    assert all(times <= (2 if name in lost else 1) for name, times in tried.items())
    assert all(fit.settle(execution) == execution for execution in executions)
    for number, execution in enumerate(executions if workers == 1 else []):
        assert out_of_memory(execution, done.records[:number]) is None
    statuses = done.study.candidates()
    assert len({status.candidate.id for status in statuses}) == len(statuses)
    left_out = [status for status in statuses if status.state in (State.SKIPPED, State.NOT_STARTED)]
    assert all(status.reason for status in left_out)
    said_with_it = tuple(state.value.replace("_", " ") for state in State)
    assert not any(status.reason.startswith(said_with_it) for status in left_out if status.reason)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 99), budget=st.sampled_from([90.0, 200.0, 500.0]), length=st.integers(0, 12))
def test_the_same_records_and_seconds_left_give_the_same_answers(seed: int, budget: float, length: int) -> None:
    outcome = random_outcome(seed, [Fate.COMPLETE] * 6 + [Fate.FAILED, Fate.OUT_OF_MEMORY])
    whole = replay(study(), outcome, budget=budget, most=15)
    elapsed = sum(one.seconds.total or 1.0 for one in whole.records[:length])
    rest = replay(
        study(whole.records[:length]), outcome, budget=budget - elapsed, most=15 - min(length, len(whole.records))
    )
    assert [trial.candidate for trial in rest.trials] == [trial.candidate for trial in whole.trials[length:]]


def test_a_baseline_whose_node_goes_away_is_measured_on_another() -> None:
    losses = iter([Fate.LOST])

    def outcome(trial: Trial) -> TrialRecord:
        fate = next(losses, None)
        return gh200(trial) if fate is None else record(trial.candidate, fate, reason="its node went away")

    asked = study()
    begun = replay(asked, outcome, stop_after=1)
    status = begun.study.baseline()
    assert (status.state, status.fate, status.reason) == (State.FINISHED, Fate.LOST, "its node went away")
    done = replay(asked, outcome)
    assert done.labels[:2] == ["mb32 compiled default auto t8", "mb32 eager auto t8"]
    assert done.study.baseline().fate == Fate.COMPLETE
    assert done.trials[0].candidate == begun.trials[0].candidate


# Resume


@pytest.mark.parametrize("fate", sorted(MEASURED_AGAIN))
def test_timed_out_and_lost_ones_are_measured_again(fate: Fate) -> None:
    broken = replay(study(), fates({"mb32 eager": fate}), stop_after=3)
    assert broken.labels.count("mb32 eager auto t8") == (2 if fate == Fate.LOST else 1), "in one run"
    going = study(broken.records)
    (known,) = (status for status in going.candidates() if status.candidate.label == "mb32 eager auto t8")
    assert (known.state, known.fate) == (State.FINISHED, fate), "all that is known until then"
    again = take(going)
    assert (again.candidate.label, again.candidate.id[:3]) == ("mb32 eager auto t8", "c02")
    assert states(going)["mb32 eager auto t8"] == State.RUNNING


def test_what_the_search_cut_may_do_with_more_time() -> None:
    """No setting is at fault of it, and it is measured once it promises as much as it did."""
    broken = replay(study(), fates({"mb32 compiled max-autotune": Fate.TIMED_OUT}))
    cut = next(one for one in broken.records if one.fate == Fate.TIMED_OUT)
    assert replay(broken.study).trials == [], "in one run it is settled"
    again = replay(study(broken.records))
    assert cut.execution_identity in {trial.candidate.execution_identity for trial in again.trials}


@pytest.mark.parametrize("fate", sorted(MEASURED_AGAIN))
def test_one_that_failed_and_was_cut_when_it_was_tried_again_is_settled_no_more(fate: Fate) -> None:
    broken = replay(study(), fates({"mb32 eager": Fate.FAILED}), stop_after=2)
    failed = broken.records[1]
    records = [*broken.records, failed.model_copy(update={"fate": fate})]
    assert take(study(records)).candidate.id == failed.candidate
    assert take(study(records[:2])).candidate.id != failed.candidate


def test_a_finished_study_has_nothing_to_do_when_it_is_resumed() -> None:
    whole = replay(study())
    rest = replay(study(whole.records))
    assert rest.trials == []
    assert rest.finished == whole.finished
    assert rest.study.candidates() == whole.study.candidates()


def test_recorded_ids_are_kept_as_they_are() -> None:
    asked = study()
    renamed = gh200(take(asked)).model_copy(update={"candidate": "c02-written-by-an-older-version"})
    ids = [status.candidate.id for status in study([renamed]).candidates()]
    assert ids[:2] == ["c01-mb32-eager-auto-t8", "c02-written-by-an-older-version"]


def test_a_later_resume_with_more_values_keeps_the_numbers_given() -> None:
    small = Space.model_validate(GH200_SPACE.model_dump() | {"factors": {"update": ["compiled"], "cpu_threads": [4]}})
    first = replay(study(fit=fitted(small)), lambda trial: record(trial.candidate, rates=(100.0,)))
    ids = [status.candidate.id for status in study(first.records).candidates()]
    assert ids[: len(first.trials)] == [trial.candidate.id for trial in first.trials]
    assert len(set(ids)) == len(ids)


# Protocols, accounts, winners


def test_the_protocol_given_goes_before_the_spaces() -> None:
    short, long = (Study(fitted(), protocol) for protocol in (Protocol(updates_per_window=1), None))
    assert take(short).prediction.windows.expected * 99 < take(long).prediction.windows.expected


def test_the_end_says_what_was_spent_what_is_saved_and_when_that_pays_back() -> None:
    done = replay(study(fit=fitted(KERNEL_SPACE)), made_up(planted))
    spent = done.study.account()
    assert spent is not None
    assert spent.spent_seconds == pytest.approx(30 * len(done.trials))
    assert spent.pays_back_after_runs is not None
    baseline, best = done.study.baseline().record, done.study.selection()
    assert baseline is not None
    assert best is not None
    each = RECIPE / (baseline.targets_per_second or 0) - RECIPE / (best.record.targets_per_second or 0)
    assert spent.saved_seconds == pytest.approx(240 * each, rel=0.02)
    runs = spent.pays_back_after_runs
    assert (runs - 1) * each < spent.spent_seconds + 5
    assert spent.spent_seconds <= runs * each + 5
    assert done.finished is not None
    assert f"spent {spent.spent_seconds:,.0f} s and saves " in done.finished.reason
    assert f"paid back after {runs} runs" in done.finished.reason


def test_the_winner_changes_with_the_number_of_targets() -> None:
    """Eager starts 20 s sooner and trains half as fast."""
    won = {winner.tokens: winner.record.execution["update"] for winner in replay(study(objective=ONCE)).study.winners()}
    assert won == {10**7: "eager", 10**8: "compiled", 10**9: "compiled", 10**10: "compiled"}


def test_smoke_on_a_cpu_finds_the_compiled_update() -> None:
    asked = Study(fit_space(load_space("smoke"), load("nano"), "cpu", 2), priors=Priors("cpu").without("x86"))
    speeds = {"eager": 4000.0, "compiled": 6000.0}

    def rate(execution: dict[str, Any]) -> float:
        threads = execution["cpu_threads"]
        return speeds[execution["update"]] * (1.0 if threads == 2 else 0.6) + execution["micro_batch_size"]

    done = replay(asked, made_up(rate))
    assert done.labels[0] == "mb8 eager auto t2"
    assert asked.eager_row() == asked.baseline()
    best = asked.selection()
    assert best is not None
    assert (best.record.execution["update"], best.record.execution["cpu_threads"]) == ("compiled", 2)


def test_a_read_ahead_that_gains_is_found() -> None:
    asked = space({"prefetch_depth": [0, 1, 2]}, {"update": "compiled", "cpu_threads": 4})
    done = replay(study(fit=fitted(asked)), made_up(lambda one: 1e6 * (1 + 0.02 * (one["prefetch_depth"] == 2))))
    best = done.study.selection()
    assert best is not None
    assert best.record.execution["prefetch_depth"] == 2
