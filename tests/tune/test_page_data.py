"""What a study's page says: records and a summary in, facts out; nothing is drawn."""

import dataclasses
import itertools

import pytest
from page_studies import BEGAN, GPUS, eventful_study, h200_first_study, record, summary_of

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, GpuState, KernelTime, Seconds, TrialRecord
from tinyllm_ray.table import table_row
from tinyllm_ray.tune.page import findings, text
from tinyllm_ray.tune.page.spending import IDLE, spending
from tinyllm_ray.tune.page.study import page_data
from tinyllm_ray.tune.page.write import study_page


def test_the_recorded_study_is_told_with_its_own_figures() -> None:
    records, summary = h200_first_study()
    page = page_data(records, summary)
    assert page.selected is not None
    assert page.selected.role == "selected"
    assert page.selected.targets_per_second == pytest.approx(1_893_538, abs=1)
    assert page.speedup == findings.Speedup(pytest.approx(1_893_538 / 1_886_480, rel=1e-6))
    assert [factor.name for factor in page.factors] == [
        "micro_batch_size",
        "update",
        "compile_mode",
        "sdpa_backend",
        "cpu_threads",
    ]
    micro_batches = page.factors[0]
    assert [value for value, _, _ in micro_batches.values] == ["32", "16", "8"]
    assert micro_batches.values[0][1][0].candidate == "c17-mb32-compiled-default-cudnn-t1"
    assert len(page.candidates) == 10


def test_every_second_of_the_budget_is_accounted_for_on_every_device() -> None:
    for records, summary in (h200_first_study(), eventful_study()):
        spent = spending(records, summary)
        for sums in spent.sums.values():
            assert sum(sums.values()) == pytest.approx(summary["elapsed_seconds"])
        for device in spent.sums:
            lane = sorted((one.began, one.began + one.seconds) for one in spent.slices if one.device == device)
            assert lane[0][0] >= 0
            assert lane[-1][1] <= summary["elapsed_seconds"] + 1e-6
            assert all(end <= begin + 1e-6 for (_, end), (begin, _) in itertools.pairwise(lane))


def test_a_stage_lies_where_the_windows_times_put_it() -> None:
    seconds = Seconds(start=1.0, compile=2.0, warmup=0.5, windows=3.0, proof=1.5, total=10.0)
    one = record("c01", 1000.0, BEGAN, seconds=seconds)
    spent = spending([one], {"elapsed_seconds": 15.0, "timestamp": BEGAN + 12.0})
    slices = [(slice.stage, round(slice.began, 6), slice.seconds) for slice in spent.slices]
    # `record` puts 1.0 s before the start; 3 s went by before the request, 1 s is left after the proof.
    assert slices == [
        ("process", 3.0, 1.0),
        ("start", 4.0, 1.0),
        ("compile", 5.0, 2.0),
        ("warmup", 7.0, 0.5),
        ("windows", 7.5, 3.0),
        ("proof", 10.5, 1.5),
        ("process", 12.0, 1.0),
    ]
    assert spent.sums["NVIDIA H200 on node0 (0e00)"][IDLE] == pytest.approx(5.0)


def test_what_never_had_a_device_is_on_the_only_one_there_is() -> None:
    failed = record("c02", None, BEGAN + 14, fate=Fate.FAILED).model_copy(update={"devices": []})
    one = [record("c01", 1000.0, BEGAN), failed]
    assert list(spending(one, {}).sums) == ["NVIDIA H200 on node0 (0e00)"]
    two = [*one, record("c03", 1000.0, BEGAN + 30, device=GPUS[1])]
    assert set(spending(two, {}).sums) >= {"NVIDIA H200 on node0 (0e00)", "unknown device"}


def test_the_days_between_two_sessions_are_not_in_the_budget() -> None:
    day = 86_400.0
    records = [record("c01", 1000.0, BEGAN), record("c02", 1100.0, BEGAN + 14), record("c03", 1200.0, BEGAN + day)]
    spent = spending(records, {"elapsed_seconds": 60.0, "timestamp": BEGAN + day + 15})
    begins = {one.candidate: one.began for one in reversed(spent.slices)}
    ends = max(one.began + one.seconds for one in spent.slices)
    assert begins["c02"] - begins["c01"] == pytest.approx(14.0)
    assert begins["c03"] < 60
    assert ends <= 60


def test_a_verification_gives_the_speed_up_and_its_interval() -> None:
    records, summary = eventful_study()
    page = page_data(records, summary)
    assert page.speedup is not None
    assert page.speedup.pairs == 4
    assert page.speedup.low is not None
    assert page.speedup.high is not None
    assert page.speedup.low < 1.198 < page.speedup.high
    assert page.speedup.ratio == pytest.approx(1.198, abs=0.002)
    assert [number for number, _ in page.rounds] == [0, 1, 2, 3]
    assert "The winner and the baseline were not measured under a minute's sustained load; what" in study_page(page)
    sustained = Protocol(version="adaptive", least_seconds=60.0)
    loaded = [one.model_copy(update={"protocol": sustained}) if one.round == 3 else one for one in records]
    page = page_data(loaded, summary)
    assert page.under_load == {3}
    assert "<td>4, a minute&#39;s load</td>" in study_page(page)
    assert "sustained load" not in study_page(page)
    # Processes of the verification are no candidates.
    assert len(page.candidates) == 24


def test_the_studys_own_speed_up_comes_before_one_worked_out_here() -> None:
    records, summary = eventful_study()
    summary["speedup"] = {"ratio": 1.3, "low": 1.2, "high": 1.4, "pairs": 5}
    assert page_data(records, summary).speedup == findings.Speedup(1.3, 1.2, 1.4, 5)


def test_a_study_is_paid_back_when_its_device_time_is_saved() -> None:
    base, best = record("c01", 1000.0, BEGAN), record("c02", 1250.0, BEGAN)
    # A token takes 1 ms and 0.8 ms: 2 x 100 s are saved after a million tokens, which take 800 s.
    paid = findings.payback(100.0, 2, base, best, 1.25)
    assert paid.targets == pytest.approx(1e6)
    assert paid.training_seconds == pytest.approx(800.0)
    assert findings.payback(100.0, 2, base, best, 0.99).targets is None
    assert findings.payback(100.0, 2, None, best, None).targets is None


def test_a_speed_up_whose_interval_holds_1_pays_nothing_back() -> None:
    records, summary = eventful_study()
    for low, paid in ((0.999, False), (1.001, True)):
        page = page_data(records, summary | {"speedup": {"ratio": 1.01, "low": low, "high": 1.02, "pairs": 3}})
        assert (page.payback.targets is not None) == paid


def test_a_short_training_is_won_by_what_starts_soon() -> None:
    slow_start = record("c01", 2e6, BEGAN, seconds=Seconds(start=1.0, compile=60.0, total=80.0))
    quick_start = record("c02", 1e6, BEGAN, seconds=Seconds(start=1.0, compile=1.0, total=20.0))
    found = findings.winners([slow_start, quick_start], slow_start)
    assert [one.candidate for one in found] == ["c02", "c02", "c01", "c01"]
    assert found[0].seconds == pytest.approx(12.0)
    assert found[0].baseline_seconds == pytest.approx(66.0)


def test_the_page_names_the_winners_that_the_study_does() -> None:
    """Of all planned trainings: a compilation that one training does not earn back ten do, and its record may be one
    that found another's in the cache."""
    slow_start = record("c01", 2e6, BEGAN, seconds=Seconds(start=1.0, compile=60.0, total=80.0))
    quick_start = record("c02", 1e6, BEGAN, seconds=Seconds(start=1.0, compile=1.0, total=20.0))
    told = [{"tokens": 10**7, "candidate": "c01", "seconds": 150.0, "baseline_seconds": 210.0}]
    summary = {"winners": told, "objective": {"kind": "training", "runs": 10}, "baseline": {"candidate": "c02"}}
    page = page_data([slow_start, quick_start], summary)
    assert page.winners == (findings.Winner(10**7, "c01", 150.0, 210.0),)
    assert "10 trainings of so many tokens" in study_page(page)
    page = page_data([slow_start, quick_start], {})
    assert (page.winners[0].candidate, page.runs) == ("c02", 1), "without a summary by one training"
    assert "trainings of so many tokens" not in study_page(page)


def test_a_value_that_only_failed_is_told_by_its_fates() -> None:
    records = [
        record("c01", 1000.0, BEGAN, execution={"micro_batch_size": 8}),
        record("c02", None, BEGAN, execution={"micro_batch_size": 64}, fate=Fate.OUT_OF_MEMORY, reason="x"),
    ]
    (factor,) = findings.factors(records)
    assert factor.values[1] == ("64", (), "out of memory")


def test_kernels_are_added_up_by_category() -> None:
    kernels = [
        KernelTime(name=name, category=category, milliseconds=1.5, launches=1)
        for name, category in (("a", "matmul"), ("b", "matmul"), ("c", "norm"))
    ]
    base = record("c01", 1000.0, BEGAN)
    best = base.model_copy(update={"kernels": kernels})
    assert findings.kernel_times(base, best) == (findings.Pair("matmul", None, 3.0), findings.Pair("norm", None, 1.5))


def test_devices_are_compared_by_their_controls_alone() -> None:
    records, summary = eventful_study()
    devices = page_data(records, summary).devices
    assert [(one.slow, round(one.ratio, 3)) for one in devices] == [(False, 1.0), (False, 0.993), (True, 0.951)]
    assert GPUS[2].host in devices[2].device
    assert page_data(*h200_first_study()).devices == ()


def test_figures_of_several_devices_are_compared_as_on_the_baselines() -> None:
    """The second GPU is 4% slower: by bare figures the baseline would win every length of training."""
    base, other = {"update": "compiled"}, {"update": "graph"}
    records = [
        record("c01", 1_000_000.0, BEGAN, execution=base, device=GPUS[0]),
        record("c01-control1", 960_000.0, BEGAN, execution=base, device=GPUS[1], purpose="control"),
        record("c02", 988_800.0, BEGAN + 20, execution=other, device=GPUS[1]),
    ]
    page = page_data(records, {"baseline": {"candidate": "c01"}})
    assert [(round(one.ratio, 3), one.controls) for one in page.devices] == [(1.0, 1), (0.96, 1)]
    points = {value: points[0].targets_per_second for value, points, _ in page.factors[0].values}
    assert points == pytest.approx({"compiled": 1_000_000.0, "graph": 1_030_000.0})
    assert page.winners[-1].candidate == "c02"
    shown = {one.name: one.targets_per_second for one in page.candidates}
    assert shown["c02"] == 988_800.0, "as it was measured"
    rows = [{"candidate": "c02", "label": "graph", "versus_baseline": 1.03}]
    page = page_data(records, {"baseline": {"candidate": "c01"}, "candidates": rows})
    assert {one.name: one.versus_baseline for one in page.candidates}["c02"] == 1.03


def test_the_last_record_of_a_candidate_counts_and_records_may_be_ahead_of_the_summary() -> None:
    records, summary = h200_first_study()
    summary["candidates"] = summary["candidates"][:1]
    again = records[0].model_copy(update={"targets_per_second": 5.0})
    page = page_data([*records, again], summary)
    assert len(page.candidates) == 10
    assert page.candidates[0].targets_per_second == 5.0


def test_a_study_that_was_cut_at_once_has_a_page_without_a_verdict() -> None:
    for records in ([], [record("c01", 1000.0, BEGAN)]):
        page = page_data(records, {})
        assert page.selected is None
        assert page.ended is None
        assert page.speedup is None
        assert len(page.candidates) == len(records)


def test_the_baseline_may_be_selected_itself() -> None:
    records = [record("c01", 1000.0, BEGAN, execution={"update": "eager"})]
    page = page_data(records, summary_of(records, "c01", 20.0, 60.0))
    assert page.selected is not None
    assert page.selected.role == "selected, baseline, eager"
    assert page.payback.targets is None


def test_evidence_names_what_is_known_and_nothing_else() -> None:
    records, summary = eventful_study()
    by_name = {one.name: dict(one.evidence) for one in page_data(records, summary).candidates}
    assert by_name["c00"]["attention"] == "flash (asked for: auto)"
    assert by_name["c00"]["parity with float32"] == "loss 1.0e-06, gradients 2.0e-03"
    assert by_name["c00"]["memory"] == "8.00 GiB"
    assert "windows" not in by_name["c03"]
    bare = dataclasses.replace(page_data(*h200_first_study()).candidates[0])
    assert "attention" not in dict(bare.evidence)
    assert not {"energy", "power", "windows with held clocks"} & set(dict(bare.evidence)), "no sensor told anything"


def sensed() -> TrialRecord:
    """Three windows of 3,276,800 targets, the second with clocks that heat and power held."""
    states = [
        GpuState(sm_clock_mhz=1980, power_watts=640.2, temperature_celsius=50, throttle_reasons=[], energy_joules=1000),
        GpuState(
            sm_clock_mhz=1620,
            power_watts=699.6,
            temperature_celsius=83,
            throttle_reasons=["sw_power_cap", "sw_thermal_slowdown"],
            energy_joules=1200,
        ),
        GpuState(sm_clock_mhz=1980, power_watts=650, temperature_celsius=83, throttle_reasons=[], energy_joules=1100),
    ]
    one = record("c01", 1e6, BEGAN, execution={"update": "eager"})
    windows = [window.model_copy(update={"gpu": gpu}) for window, gpu in zip(one.windows, states, strict=True)]
    return one.model_copy(update={"windows": windows})


def test_evidence_has_what_the_sensors_told_and_which_windows_were_throttled() -> None:
    evidence = dict(page_data([sensed()], {}).candidates[0].evidence)
    assert evidence["clock"] == "1,620 to 1,980 MHz"
    assert evidence["power"] == "640 to 700 W"
    assert evidence["temperature"] == "50 to 83 °C"
    assert evidence["windows with held clocks"] == "2"
    assert evidence["clocks held by"] == "sw power cap, sw thermal slowdown"
    assert evidence["energy"] == "2,979 targets a joule"
    assert "memory clock" not in evidence


def test_tokens_per_joule_stand_in_the_tables_for_other_programs_and_on_the_page() -> None:
    row = table_row(sensed())
    assert row["targets_per_joule"] == pytest.approx(3 * 3_276_800 / 3300)
    assert row["throttled_windows"] == 1
    assert table_row(record("c01", 1e6, BEGAN))["throttled_windows"] is None, "unknown is not none"
    page = study_page(page_data([sensed()], summary_of([sensed()], "c01", 20.0, 60.0)))
    assert "2,979 targets a joule" in page[: page.index("All candidates")]


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (text.rate, 1_886_479.9, "1.89 M"),
        (text.rate, 812_410.4, "812 k"),
        (text.rate, 999_999.0, "1 M"),
        (text.rate, 4_424.0, "4,424"),
        (text.rate, None, "—"),
        (text.seconds, 0.0, "0 s"),
        (text.seconds, 9.5e-5, "<0.01 s"),
        (text.seconds, 9.96, "10 s"),
        (text.seconds, 270.0, "4.5 min"),
        (text.seconds, 200_000.0, "2.31 days"),
        (text.seconds, 127_900_000.0, "1,480 days"),
        (text.ratio, 1.3449, "1.34\N{MULTIPLICATION SIGN}"),
        (text.ratio, None, "—"),
        (text.tokens, 10**10, "10 B"),
        (text.tokens, 617_950.0, "618 k"),
    ],
)
def test_figures_are_shown_in_digits_that_count(form, value, shown) -> None:
    assert form(value) == shown


def test_text_that_no_file_can_hold_is_made_printable() -> None:
    assert text.printable("a\x00\nb\ud800c\uffff") == "a��b�c�"
    assert text.printable("x" * 300, 10) == "x" * 9 + "…"
