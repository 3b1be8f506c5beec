"""When a device measures the control, and records of several devices beside each other."""

import math
from itertools import pairwise
from typing import Any

import pytest
from noisy_device import a_record
from study_replay import fates, fitted, gh200, on_device, replay
from test_study import KERNEL_SPACE, MANY, ONCE, UNSEEN, made_up, planted, study

from tinyllm_ray.records import Fate, Memory, Seconds, TrialRecord, Window
from tinyllm_ray.search.answers import Finished, Trial, Wait
from tinyllm_ray.search.comparison import Comparison
from tinyllm_ray.search.controls import MOST_FAILURES, Controls
from tinyllm_ray.search.cost import Starts
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.paired import PairedVerifier
from tinyllm_ray.search.study import Study
from tinyllm_ray.search.verifier import InterleavedPairs


def measured(name: str, device: str, rate: float, at: float = 0.0, **fields: Any) -> TrialRecord:
    """A record of twenty seconds; "base" is the control's execution."""
    windows = [
        Window.model_construct(index=index, targets_per_second=rate, seconds=1.0, updates=1, targets=int(rate))
        for index in range(3)
    ]
    fields = {"purpose": "search", "timestamp": at, "seconds": Seconds(total=20.0), "memory": None} | fields
    return a_record(
        name, device=device, targets_per_second=rate, seconds_per_update=1e6 / rate, windows=windows, **fields
    )


def known(*records: TrialRecord, devices: int = 1) -> Controls:
    controls = Controls("base", devices)
    for record in records:
        controls.hear(record)
    return controls


def with_execution(record: TrialRecord) -> TrialRecord:
    """The record with an execution that differs from others in nothing that a start depends on."""
    return record.model_copy(update={"execution": dict(fitted().baseline), "memory": Memory()})


# When one is due


def stages(asked: Study, *devices: str | None, seconds: float = 1e6) -> list[str]:
    """What the study says to devices that ask one after the other, without a record in between."""
    answers = [asked.ask(seconds, device) for device in devices]
    return [answer.stage if isinstance(answer, Trial) else "wait" for answer in answers]


def test_every_device_begins_with_the_control_beside_the_baseline() -> None:
    assert stages(study(devices=3), None, None, None, None) == ["baseline", "control", "control", "wait"]
    assert stages(study(devices=1), None, None) == ["baseline", "wait"]


def test_controls_have_names_of_their_own_and_are_told_by_them() -> None:
    done = replay(study(devices=3), workers=3, speeds=(1.0, 1.0, 1.0), most=4)
    names = [trial.candidate.id for trial in done.trials]
    assert names[:3] == [names[0], f"{names[0]}-control1", f"{names[0]}-control2"]
    assert [record.purpose for record in done.study.controls.records] == ["control", "control"]
    labels = [status.candidate.label for status in done.study.candidates()]
    assert labels.count("mb32 compiled default auto t8 control") == 2
    assert done.study.controls.records[0].protocol is None or done.trials[1].protocol is not None
    protocol = done.trials[1].protocol
    assert protocol is not None
    assert (protocol.version, protocol.most_windows, protocol.least_seconds) == ("adaptive", 3, 0)


def test_a_device_that_began_late_measures_the_control_before_any_candidate() -> None:
    """Its first trial was another's control, which a quick process took from it."""
    asked = study(devices=2)
    baseline = asked.ask(1e6)
    control = asked.ask(1e6)
    for trial in (baseline, control):
        assert isinstance(trial, Trial)
        result = on_device(gh200(trial), 0, 1.0, 0.0)
        asked.tell(result.model_copy(update={"purpose": "control" if trial is control else "search"}))
    eager = asked.ask(1e6, "GPU-0")
    assert isinstance(eager, Trial)
    assert eager.stage == "eager"
    asked.tell(on_device(gh200(eager), 1, 1.0, 30.0))
    assert stages(asked, "GPU-0", "GPU-1") == ["search", "control"]


@pytest.mark.parametrize("seconds", [1e6, 300.0])
def test_a_study_that_goes_on_elsewhere_measures_the_control_there(seconds: float) -> None:
    """However little is left: without it the two devices' figures say next to nothing of each other."""
    asked = study(going(100.0)._cost.records)
    trial = asked.ask(seconds)
    assert isinstance(trial, Trial)
    assert trial.stage == "search"
    asked.tell(on_device(gh200(trial), 1, 0.96, 86400.0))
    assert stages(asked, "GPU-1", seconds=seconds) == ["control"]


def test_a_device_that_has_its_control_goes_on_where_others_have_not_come_yet() -> None:
    """They may be busy with another's job for as long as the study lasts."""
    asked = study(devices=4)
    baseline = asked.ask(1e6)
    assert isinstance(baseline, Trial)
    asked.tell(on_device(gh200(baseline), 0, 1.0, 0.0))
    assert stages(asked, "GPU-0", None, "GPU-0") == ["eager", "control", "search"]


def test_no_control_is_measured_where_nothing_comes_after_it() -> None:
    """A single training, for which nothing else pays."""
    asked = study(going(601.0)._cost.records, objective=ONCE, verifier=InterleavedPairs())
    assert isinstance(asked.ask(1e6, "GPU-0"), Finished)


def going(until: float) -> Study:
    """One device whose baseline began at 0 and whose last trial ended at `until`."""
    asked = study()
    for stage in ("baseline", "eager"):
        trial = asked.ask(1e6)
        assert isinstance(trial, Trial)
        assert trial.stage == stage
        result = gh200(trial)
        asked.tell(on_device(result, 0, 1.0, 0.0 if stage == "baseline" else until - (result.seconds.total or 0.0)))
    return asked


def test_the_control_comes_again_after_ten_minutes_of_measuring() -> None:
    assert stages(going(599.0), "GPU-0") == ["search"]
    assert stages(going(601.0), "GPU-0") == ["control"]
    assert stages(going(601.0), None) == ["search"], "which device is free is not known"


def test_a_control_that_takes_more_than_a_fiftieth_of_what_is_left_is_not_worth_it() -> None:
    control = going(601.0).ask(1e6, "GPU-0")
    assert isinstance(control, Trial)
    seconds = control.prediction.expected_seconds
    assert stages(going(601.0), "GPU-0", seconds=51 * seconds) == ["control"]
    assert stages(going(601.0), "GPU-0", seconds=49 * seconds) == ["search"]


def test_a_study_of_less_than_ten_minutes_has_the_baseline_for_its_control() -> None:
    done = replay(study(), budget=595, speeds=(1.0,))
    assert "control" not in [trial.stage for trial in done.trials]
    assert len(done.trials) > 5


def test_a_long_study_measures_the_control_every_ten_minutes() -> None:
    """Candidates of two minutes each."""
    fit = fitted(KERNEL_SPACE)

    def slow(trial: Trial) -> TrialRecord:
        result = made_up(planted)(trial)
        total = 10.0 if trial.stage == "control" else 120.0
        return result.model_copy(update={"seconds": result.seconds.model_copy(update={"total": total})})

    done = replay(Study(fit, priors=UNSEEN), slow, speeds=(1.0,), budget=7200, most=24)
    order = [trial.stage for trial in done.trials]
    assert order[:7] == ["baseline", "eager", "search", "search", "search", "control", "search"]
    places = [place for place, stage in enumerate(order) if stage == "control"]
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert gaps
    assert all(4 <= gap <= 6 for gap in gaps)


def test_controls_that_fail_are_not_asked_for_without_end() -> None:
    def outcome(trial: Trial) -> TrialRecord:
        result = gh200(trial)
        failed = {"fate": Fate.FAILED, "windows": [], "targets_per_second": None}
        return result.model_copy(update=failed if trial.stage == "control" else {})

    done = replay(study(devices=8), outcome, workers=8, speeds=(1.0,) * 8)
    assert [trial.stage for trial in done.trials].count("control") <= 7 + MOST_FAILURES
    assert done.finished is not None
    assert done.study.selection() is not None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_devices_that_compile_the_control_at_once_do_not_teach_how_long_a_warm_one_takes(
    order: tuple[int, ...],
) -> None:
    """18 s each on one host; only what comes after them finds the compilation there."""
    asked = study(devices=3)
    trials = [asked.ask(1e6) for _ in range(3)]
    before = asked._cost.starts(asked.space.baseline)
    for number in order:
        trial = trials[number]
        assert isinstance(trial, Trial)
        purpose = "control" if trial.stage == "control" else "search"
        asked.tell(on_device(gh200(trial), number, 1.0, 0.0).model_copy(update={"purpose": purpose}))
    starts = asked._cost.starts(asked.space.baseline)
    assert starts.cold == 18.31
    assert starts.warm == pytest.approx(before.warm, rel=0.2), "what is known of other machines"
    again = trials[0]
    assert isinstance(again, Trial)
    warm = on_device(gh200(again), 1, 1.0, 600.0)
    asked._learn(warm.model_copy(update={"seconds": warm.seconds.model_copy(update={"compile": 2.5})}))
    assert asked._cost.starts(asked.space.baseline).warm == 2.5


def test_a_broken_study_goes_on_with_the_controls_it_has() -> None:
    first = replay(study(devices=2), workers=2, speeds=(1.0, 0.97), stop_after=4)
    second = study(first.records, devices=2)
    assert [speed.ratio for speed in second.controls.speeds()] == pytest.approx([1.0, 0.97], rel=1e-3)
    answer = second.ask(1e6)
    assert isinstance(answer, Trial)
    assert answer.stage in ("eager", "search")
    ids = [status.candidate.id for status in second.candidates()]
    assert (
        ids.count("c01-mb32-compiled-default-auto-t8") == ids.count("c01-mb32-compiled-default-auto-t8-control1") == 1
    )


def test_the_baselines_figure_is_its_own_and_no_controls() -> None:
    first = replay(study(devices=2), workers=2, speeds=(1.0, 0.97), stop_after=4)
    records = sorted(first.records, key=lambda record: record.purpose != "control")
    for asked in (first.study, study(first.records, devices=2), study(records, devices=2)):
        baseline = asked.baseline().record
        assert baseline is not None
        assert (baseline.purpose, baseline.candidate) == ("search", "c01-mb32-compiled-default-auto-t8")


def test_a_baseline_that_fails_on_the_only_device_has_no_control() -> None:
    done = replay(study(), fates({"mb32 compiled default auto": Fate.FAILED}), most=6)
    assert "control" not in [trial.stage for trial in done.trials]


# What they say


def test_records_are_levelled_to_the_first_controls_device() -> None:
    base, other = measured("base", "a", 1e6), measured("base", "b", 0.95e6, purpose="control")
    fast, slow = measured("x", "a", 1.02e6, 60.0), measured("x", "b", 0.969e6, 60.0)
    controls = known(base, other, fast, slow)
    levelled = controls.levelled([base, fast, slow])
    assert levelled[0] is base
    assert levelled[1] is fast
    assert levelled[2].targets_per_second == pytest.approx(1.02e6)
    assert levelled[2].windows[0].targets_per_second == pytest.approx(1.02e6)
    assert levelled[2].seconds_per_update == pytest.approx(1 / 1.02)
    assert slow.targets_per_second == 0.969e6, "what was measured stays as it is"


def test_the_doubt_about_two_devices_is_none_on_one_and_much_without_controls() -> None:
    controls = known(measured("base", "a", 1e6), measured("base", "b", 0.95e6, purpose="control"))
    one, two, three = (measured("x", device, 1e6) for device in "abc")
    assert controls.doubt(one, one) == 0
    assert 0.002 < controls.doubt(one, two) < 0.01
    assert controls.doubt(one, three) == pytest.approx(0.03, rel=0.01)


def test_what_has_to_be_reached_is_what_the_slowest_device_can() -> None:
    base, other = measured("base", "a", 1e6), measured("base", "b", 0.95e6, purpose="control")
    assert known(base).slowest(base) == 1.0
    assert known(base, devices=2).slowest(base) < 0.95, "the second has not measured anything yet"
    assert 0.92 < known(base, other, devices=2).slowest(base) < 0.95
    assert known(base, other, devices=2).slowest(other) == 1.0


def test_the_best_execution_is_chosen_though_a_slow_device_measured_it() -> None:
    """Two devices 4% apart: by bare figures the slower execution on the fast one would win."""
    fit = fitted(KERNEL_SPACE)
    asked = Study(fit, devices=2, objective=MANY, priors=UNSEEN)

    def on(number: int, settings: dict[str, Any], speed: float, purpose: str = "search") -> TrialRecord:
        trial = Trial(asked._candidates.register(fit.settle(settings)), purpose, None)
        outcome = made_up(lambda _: 1.5e6 * speed)(trial)
        return on_device(outcome, number, (1.0, 0.96)[number], 0.0).model_copy(update={"purpose": purpose})

    better = {"loss_kernel": "triton"}
    records = [on(0, {}, 1.0), on(1, {}, 1.0, "control"), on(1, better, 1.03), on(0, {"sdpa_backend": "flash"}, 1.01)]
    asked = Study(fit, devices=2, objective=MANY, priors=UNSEEN, records=records)
    bare = max(records, key=lambda record: record.targets_per_second or 0)
    assert bare.execution["sdpa_backend"] == "flash"
    incumbent, selection = asked.incumbent(), asked.selection()
    assert incumbent is not None
    assert selection is not None
    assert incumbent.execution["loss_kernel"] == selection.record.execution["loss_kernel"] == "triton"
    assert selection.record.targets_per_second == pytest.approx(1.5e6 * 1.03 * 0.96), "as it was measured"
    assert asked.versus_baseline(selection.record) == pytest.approx(1.03, rel=1e-3)


def test_what_two_devices_ratio_leaves_open_is_a_tie() -> None:
    """0.3% between executions that ran on two devices, of which each has measured the control once."""
    for device, chosen in (("b", "base"), ("a", "x")):
        base, other = measured("base", "a", 1e6), measured("base", "b", 0.95e6, purpose="control")
        better = measured("x", device, 1.003e6 * (0.95 if device == "b" else 1.0))
        results = {record.execution_identity: with_execution(record) for record in (base, better)}
        compared = Comparison(results, known(base, other, better), "base", Objective())
        selection = compared.choose(lambda execution: Starts(1.0, 1.0, 1.0), lambda record: 0.0)
        assert selection is not None
        assert selection.record.execution_identity == chosen


def test_on_devices_of_different_speed_a_study_finds_what_one_device_would() -> None:
    fit = fitted(KERNEL_SPACE)
    best = max(planted(execution) for execution in fit.executions())
    for speeds in ((1.0, 0.96, 0.92), (0.92, 1.0, 0.97, 0.95)):
        asked = Study(fit, objective=MANY, priors=UNSEEN, devices=len(speeds))
        done = replay(asked, made_up(planted), workers=len(speeds), speeds=speeds)
        found = done.study.selection()
        assert found is not None
        assert planted(found.record.execution) > 0.995 * best
        ratios = {speed.device: speed.ratio for speed in done.study.controls.speeds()}
        fastest = max(speeds)
        assert ratios == pytest.approx({f"GPU-{i}": speed / fastest for i, speed in enumerate(speeds)}, rel=1e-3)
        slow = {speed.device for speed in done.study.controls.speeds() if speed.slow}
        assert slow == {f"GPU-{i}" for i, speed in enumerate(speeds) if speed / fastest < 0.98}


def test_verification_keeps_one_device_of_several_and_the_others_are_done() -> None:
    fit = fitted(KERNEL_SPACE)
    verifier = PairedVerifier(fit.protocol, most_seconds=1000, objective=MANY)
    asked = Study(fit, objective=MANY, priors=UNSEEN, verifier=verifier, devices=3)

    def seconds(trial: Trial, result: TrialRecord) -> float:
        return 100.0 if trial.stage == "baseline" else result.seconds.total or 0.0

    done = replay(asked, made_up(planted), workers=3, speeds=(1.0, 0.96, 0.97), seconds=seconds)
    assert [record.purpose for record in done.records[:3]] == ["control", "control", "search"]
    again = [record for record in done.records if record.purpose == "verification"]
    assert len(again) >= 6
    assert not any("control" in record.candidate for record in again)
    places = {record.devices[0].identifier for record in again}
    assert len(places) == 1
    chosen = done.study.verified()
    assert chosen is not None
    assert chosen.speedup is not None
    baseline = planted(fit.baseline)
    assert chosen.speedup.ratio == pytest.approx(planted(chosen.selected.execution) / baseline, rel=1e-3)
    searched = next(one for one in done.records if one.execution == chosen.selected.execution)
    assert places == {searched.devices[0].identifier}, "where its compilation is cached"
    assert not any(isinstance(asked.ask(math.inf), Wait | Trial) for _ in range(3))
