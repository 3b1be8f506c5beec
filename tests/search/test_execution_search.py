"""How a study goes about the shipped space of a GPU, which is too large to be looked through."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from study_replay import fitted, record, replay

from tinyllm_ray.records import Fate, Proof, TrialRecord
from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.outlook import Outlook
from tinyllm_ray.search.pool import Pool
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.ruled_out import named_by_auto
from tinyllm_ray.search.space import load_space
from tinyllm_ray.search.study import Study

SPACE = fitted(load_space("execution"))
MANY = Objective("training", 408_070_400, 100)
GAINS = {
    "loss_kernel": 0.1,
    "optimizer_kernel": 0.06,
    "norm_kernel": 0.02,
    "rotary_kernel": 0.02,
    "activation_kernel": 0.02,
    "residual_dtype": 0.06,
}
BROKEN = frozenset({("loss_kernel", "triton")})


def on(execution: dict[str, Any]) -> set[str]:
    """The settings of `GAINS` that are not the baseline's."""
    return {key for key in GAINS if execution[key] != SPACE.baseline[key]}


def log_rate(execution: dict[str, Any]) -> float:
    small = 0.3 if execution["update"] == "compiled" else 0.1
    eager = 0.8 * (execution["update"] == "eager")
    return math.log(1.9e6) - eager - small * math.log2(32 / execution["micro_batch_size"]) + sum(
        GAINS[key] for key in on(execution)
    )  # fmt: skip


def outcome(runs_as: str | None, broken: frozenset[tuple[str, Any]] = frozenset()) -> Callable[[Trial], TrialRecord]:
    """Half a minute each; `auto` attention is recorded as `runs_as`."""

    def ended(trial: Trial) -> TrialRecord:
        execution = trial.candidate.execution
        fails = any(item in broken for item in execution.items())
        rate = math.exp(log_rate(execution))
        asked = execution["sdpa_backend"]
        seen = [name] if (name := runs_as if asked == "auto" else asked) else []
        return record(
            trial.candidate,
            Fate.FAILED if fails else Fate.COMPLETE,
            rates=() if fails else (0.998 * rate, rate, 1.002 * rate),
            seconds={"start": 1.0, "compile": 20.0, "warmup": 1.0, "windows": 7.0, "total": 15.0 if fails else 30.0},
            proof=Proof(kernel_source="device", attention_asked=asked, attention_seen=seen),
        )

    return ended


def study() -> Study:
    return Study(SPACE, objective=MANY, priors=Priors("cuda"))


def test_settings_that_promise_something_are_changed_together() -> None:
    done = replay(study(), outcome("cudnn"), most=3)
    assert [trial.stage for trial in done.trials] == ["baseline", "eager", "search"]
    jump = done.trials[2].candidate.execution
    assert on(jump) == set(GAINS)
    assert jump["update"] == "graph"


def test_one_broken_kernel_does_not_keep_the_others_out() -> None:
    """Eight settings promise something, and fail together at first: eleven measurements tell which one is to blame."""
    done = replay(study(), outcome("cudnn", BROKEN), budget=360)
    assert done.records[2].fate == Fate.FAILED
    assert len(done.records) <= 13
    selection = done.study.selection()
    assert selection is not None
    assert on(selection.record.execution) == set(GAINS) - {"loss_kernel"}
    assert sum(record.fate == Fate.FAILED for record in done.records) <= 4


@pytest.mark.parametrize(("runs_as", "asked"), [("cudnn", False), (None, True)])
def test_what_auto_runs_is_not_measured_again_by_its_name(runs_as: str | None, asked: bool) -> None:
    done = replay(study(), outcome(runs_as), budget=700)
    assert any(trial.candidate.execution["sdpa_backend"] == "cudnn" for trial in done.trials) == asked
    assert any(trial.candidate.execution["sdpa_backend"] == "flash" for trial in done.trials)


def test_auto_is_one_backend_only_where_all_that_ran_agree() -> None:
    first = replay(study(), outcome("cudnn"), most=2).records
    other = first[1].model_copy(update={"proof": Proof(kernel_source="device", attention_seen=["flash"])})
    operators = first[0].model_copy(update={"proof": Proof(kernel_source="operators", attention_seen=["flash"])})
    failed = other.model_copy(update={"fate": Fate.INVALID})
    assert named_by_auto(first) == named_by_auto([*first, failed]) == "cudnn"
    assert named_by_auto([first[0], other]) is None
    assert named_by_auto([operators]) is None
    assert named_by_auto([first[0].model_copy(update={"proof": None})]) is None


def test_few_of_many_thousand_executions_are_thought_of_and_the_best_is_among_them() -> None:
    asked = study()
    done = replay(asked, outcome("cudnn"), most=3)
    outlook = Outlook(SPACE, MANY, asked._cost, Priors("cuda"))
    anchors = [done.records[2].execution, SPACE.baseline]
    reach = Pool(SPACE).around(anchors, outlook.gains_a_second, outlook.host_bound)
    assert 30 < len(reach) < 400
    assert any(on(execution) == set(GAINS) and execution["update"] == "graph" for execution in reach.values())


def test_the_climb_goes_round_what_is_known_to_fail() -> None:
    """Its top is where a measurement gains most, so that what lies beside the best that can run is thought of, too."""
    asked = study()
    everything = {key: "bfloat16" if key == "residual_dtype" else "triton" for key in GAINS}
    tried = [{}, {**everything, "update": "graph"}, {"update": "graph", "loss_kernel": "triton"}, {"update": "graph"}]
    for changes in tried:
        candidate = make_candidate(1, SPACE.settle(changes))
        asked._learn(outcome("cudnn", BROKEN)(Trial(candidate, "search", asked._cost.predict(candidate.execution))))
    outlook = Outlook(SPACE, MANY, asked._cost, Priors("cuda"))
    reach = Pool(SPACE).around([SPACE.baseline], outlook.gains_a_second, outlook.host_bound)
    all_that_run = [execution for execution in reach.values() if on(execution) == set(GAINS) - {"loss_kernel"}]
    assert len(all_that_run) > 5
