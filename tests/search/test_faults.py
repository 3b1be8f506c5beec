"""What failures say of executions that were not tried."""

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from study_replay import fitted, record

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.faults import EXECUTION_AT_FAULT, SETTING_AT_FAULT, Chances
from tinyllm_ray.search.space import load_space

SPACE = fitted(load_space("execution"))
KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel", "activation_kernel", "optimizer_kernel")


def execution(*kernels: str, **changes: Any) -> dict[str, Any]:
    return SPACE.settle({**dict.fromkeys(kernels, "triton"), **changes})


def ended(fate: Fate, *kernels: str, **changes: Any) -> TrialRecord:
    return record(make_candidate(1, execution(*kernels, **changes)), fate)


def chances(*records: TrialRecord) -> Chances:
    return Chances(SPACE.baseline, [ended(Fate.COMPLETE), *records])


def test_what_was_never_tried_may_fail_and_what_ran_may_not() -> None:
    ask = chances(ended(Fate.COMPLETE, "loss_kernel"))
    assert ask(SPACE.baseline) == ask(execution("loss_kernel")) == 1
    assert ask(execution("norm_kernel")) == 1 - SETTING_AT_FAULT
    assert ask(execution("norm_kernel", "rotary_kernel")) < (1 - SETTING_AT_FAULT) ** 2


def test_one_of_many_settings_is_to_blame_for_a_failure_and_the_rest_probably_runs() -> None:
    ask = chances(ended(Fate.FAILED, *KERNELS))
    assert ask(execution(*KERNELS)) < 0.01
    assert 0.5 < ask(execution("loss_kernel")) < ask(execution()) == 1
    assert 0.15 < ask(execution(*KERNELS[1:])) < 0.35
    assert ask(execution(*KERNELS[2:])) > ask(execution(*KERNELS[1:]))


def test_a_fault_once_found_clears_the_settings_beside_it() -> None:
    ask = chances(ended(Fate.FAILED, *KERNELS), ended(Fate.INVALID, "loss_kernel"))
    assert ask(execution("loss_kernel", update="graph")) < 0.1
    assert ask(execution(*KERNELS[1:])) > 0.9 * chances()(execution(*KERNELS[1:]))


def test_a_setting_that_ran_is_cleared_and_its_pairs_are_suspected() -> None:
    ask = chances(
        ended(Fate.COMPLETE, "loss_kernel"),
        ended(Fate.COMPLETE, sdpa_backend="flash"),
        ended(Fate.INVALID, "loss_kernel", sdpa_backend="flash"),
    )
    assert ask(execution("loss_kernel", "norm_kernel")) > 0.97
    assert ask(execution("loss_kernel", "norm_kernel", sdpa_backend="flash")) < 0.55


def test_two_faults_that_no_one_setting_explains_are_both_found() -> None:
    failed = [("loss_kernel", "norm_kernel"), ("rotary_kernel", "activation_kernel")]
    fine = [ended(Fate.COMPLETE, "norm_kernel"), ended(Fate.DOMINATED, "activation_kernel")]
    ask = chances(*fine, *(ended(Fate.FAILED, *kernels) for kernels in failed))
    assert max(ask(execution("loss_kernel")), ask(execution("rotary_kernel"))) < 0.3
    assert ask(execution("optimizer_kernel", "norm_kernel")) > 0.95


def test_out_of_memory_and_lost_trials_speak_against_nothing() -> None:
    ask = chances(*(ended(fate, "loss_kernel") for fate in (Fate.OUT_OF_MEMORY, Fate.LOST)))
    assert ask(execution("loss_kernel")) == 1 - SETTING_AT_FAULT


SOME = st.lists(st.sampled_from(KERNELS), unique=True).map(tuple)


@settings(max_examples=40, deadline=None)
@given(ran=st.lists(SOME, max_size=3), failed=st.lists(SOME, max_size=5), asked=SOME)
def test_chances_are_probabilities_and_a_failure_clears_nobody(
    ran: list[tuple[str, ...]], failed: list[tuple[str, ...]], asked: tuple[str, ...]
) -> None:
    records = [ended(Fate.COMPLETE, *kernels) for kernels in ran]
    records += [ended(Fate.FAILED, *kernels) for kernels in failed]
    ask = chances(*records)
    assert 0 <= ask(execution(*asked)) <= 1
    for kernels in failed:
        assert ask(execution(*kernels)) < EXECUTION_AT_FAULT + 1e-9 or set(kernels) <= set(itertools.chain(*ran))
    alone = chances(*records[: len(ran)])
    assert ask(execution(*asked)) <= alone(execution(*asked)) + 1e-12
