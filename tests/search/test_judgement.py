"""A record that strays from the baseline's trajectory is invalid before anybody hears of it; rounding is no lie."""

from typing import Any

import pytest

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.records import Device, Fate, Proof, TrajectoryPoint, TrialRecord
from tinyllm_ray.search.judgement import judged

LOSSES = {1: 10.0, 20: 9.0, 60: 8.0}
LITTLE, MUCH = 5e-5, 5e-4
"""Of the loss, inside and outside of what bf16 may do."""


def a_record(
    execution: str, off: float = 0.0, updates: tuple[int, ...] = (1, 20, 60), kind: str = "cuda", **changes: Any
) -> TrialRecord:
    """A complete one whose losses are `off` by a share."""
    trajectory = [TrajectoryPoint(update=update, loss=LOSSES[update] * (1 + off), grad_norm=1.0) for update in updates]
    values: dict[str, Any] = {
        "study": "s",
        "candidate": f"c-{execution}",
        "kind": "measurement",
        "fate": Fate.COMPLETE,
        "recipe_identity": "r",
        "execution_identity": execution,
        "cache_identity": "t",
        "source_identity": "x",
        "source_dirty": None,
        "execution": ExecutionConfig(update="eager" if "eager" in execution else "compiled").model_dump(mode="json"),
        "devices": [Device(kind=kind, name="n", host="h")],
        "proof": Proof(trajectory=trajectory),
        "timestamp": 0.0,
    }
    return TrialRecord(**values | changes)


def told(record: TrialRecord, *earlier: TrialRecord, rates: float = 1e-6) -> TrialRecord:
    """`rates` times n is what the learning rates of the first n updates add up to."""
    return judged(record, earlier, "base", lambda update: rates * update)


def test_a_candidate_inside_stays_as_it_is() -> None:
    record = a_record("other", LITTLE)
    assert told(record, a_record("base")) is record


def test_outside_it_is_invalid_and_the_reason_says_where() -> None:
    record = told(a_record("other", MUCH), a_record("base"))
    assert record.fate is Fate.INVALID
    assert record.reason == "update 1: loss 10.005 is outside, equal runs lie in 9.999 to 10.001"


def test_a_number_that_is_not_finite_is_outside() -> None:
    points = [TrajectoryPoint(update=1, loss=10.0, grad_norm=None)]
    record = told(a_record("other", proof=Proof(trajectory=points)), a_record("base"))
    assert record.reason is not None
    assert record.reason.startswith("update 1: gradient norm is not finite, equal runs lie in ")


def test_a_cpu_repeats_more_digits() -> None:
    assert told(a_record("other", LITTLE, kind="cpu"), a_record("base", kind="cpu")).fate is Fate.INVALID
    assert told(a_record("other", LITTLE / 10, kind="cpu"), a_record("base", kind="cpu")).fate is Fate.COMPLETE


def test_more_runs_of_the_baseline_say_how_far_equal_ones_lie_apart() -> None:
    runs = [a_record("base", off) for off in (0.0, MUCH / 2, -MUCH / 2)]
    assert told(a_record("other", MUCH), *runs).fate is Fate.COMPLETE


def test_runs_that_agree_do_not_narrow_what_another_execution_may_do() -> None:
    """The same bits again say nothing of other sums."""
    assert told(a_record("other", LITTLE), *[a_record("base")] * 5).fate is Fate.COMPLETE


def test_a_long_way_of_learning_amplifies_rounding() -> None:
    far = a_record("other", MUCH, updates=(60,))
    assert told(far, a_record("base"), rates=1e-6).fate is Fate.INVALID
    assert told(far, a_record("base"), rates=0.1 / 60).fate is Fate.COMPLETE


def test_the_baseline_itself_is_not_judged_again() -> None:
    assert told(a_record("base", MUCH), a_record("base")).fate is Fate.COMPLETE


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.DOMINATED, Fate.INVALID, Fate.TIMED_OUT])
def test_another_fate_and_its_reason_stay(fate: Fate) -> None:
    record = a_record("other", MUCH, fate=fate, reason="its own")
    assert told(record, a_record("base")) is record


def test_only_what_was_complete_is_a_reference() -> None:
    assert told(a_record("other", MUCH), a_record("base", fate=Fate.INVALID)).fate is Fate.COMPLETE


@pytest.mark.parametrize("other", [{"recipe_identity": "other"}, {"cache_identity": None}])
def test_another_training_is_no_reference(other: dict[str, Any]) -> None:
    assert told(a_record("other", MUCH), a_record("base", **other)).fate is Fate.COMPLETE


def test_of_a_synthetic_batch_only_the_first_updates_count() -> None:
    """It is soon known by heart."""
    base, early, late = (
        a_record(name, off, updates=(1, 60), cache_identity=None)
        for name, off in (("base", 0.0), ("early", MUCH), ("late", 0.0))
    )
    assert late.proof is not None
    points = [late.proof.trajectory[0], late.proof.trajectory[1].model_copy(update={"loss": 4.0})]
    assert told(early, base).fate is Fate.INVALID
    assert told(late.model_copy(update={"proof": Proof(trajectory=points)}), base).fate is Fate.COMPLETE


def test_without_a_baseline_the_first_eager_execution_is_the_reference() -> None:
    failed, eager = a_record("base", fate=Fate.OUT_OF_MEMORY, proof=None), a_record("eager mb8")
    assert told(a_record("other", MUCH), failed, a_record("compiled", MUCH), eager).fate is Fate.INVALID
    assert told(a_record("other", LITTLE), failed, a_record("compiled", MUCH), eager).fate is Fate.COMPLETE
    assert told(a_record("other", MUCH), failed, a_record("compiled")).fate is Fate.COMPLETE


def test_runs_of_different_length_are_compared_where_both_have_been() -> None:
    short = a_record("other", MUCH, updates=(1,))
    assert told(short, a_record("base")).fate is Fate.INVALID
    assert told(a_record("other", LITTLE), a_record("base", updates=(1, 20))).fate is Fate.COMPLETE
    assert told(a_record("other", MUCH, updates=(60,)), a_record("base", updates=(1, 20))).fate is Fate.COMPLETE


def test_a_short_control_does_not_spare_candidates_the_updates_after_it() -> None:
    """A device's control has some hundred updates at most, and the baseline more."""
    base, control = a_record("base"), a_record("base", updates=(1, 20), purpose="control")
    honest = a_record("other", LITTLE)
    assert honest.proof is not None
    *early, late = honest.proof.trajectory
    strayed = honest.model_copy(update={"proof": Proof(trajectory=[*early, late.model_copy(update={"loss": 8.1})])})
    assert told(honest, base, control) is honest
    found = told(strayed, base, control)
    assert found.fate is Fate.INVALID
    assert found.reason is not None
    assert found.reason.startswith("update 60: loss 8.1 is outside")


def test_a_record_without_a_proof_has_nothing_to_be_judged_by() -> None:
    record = a_record("other", proof=None)
    assert told(record, a_record("base")) is record
