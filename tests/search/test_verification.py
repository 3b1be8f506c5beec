"""The last phase of a study: its order, its time, its failures, what it concludes, and how often that is right."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from noisy_device import START_SECONDS, NoisyDevice, Told, a_record, predict, verify

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, Memory, Seconds, TrialRecord
from tinyllm_ray.search.finalists import choose_finalists, reserve_seconds
from tinyllm_ray.search.noise import Spread, learned_spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD, MOST_PAIRS, Pair, Side
from tinyllm_ray.search.verification import Done, Run, Verification
from tinyllm_ray.search.verified import Evidence, conclude

QUIET = {"process_spread": 0.0005, "half_range": 0.0005, "outliers": 0.0, "drift_per_hour": 0.0}


def quiet(**changes: Any) -> NoisyDevice:
    return NoisyDevice(**{**QUIET, **changes})


def searched(device: NoisyDevice, log_ratios: dict[str, float], **fields: dict[str, Any]) -> list[TrialRecord]:
    """The search's records, with further fields by execution."""
    return [
        device.measure(name, ratio, Protocol()).model_copy(update=fields.get(name, {}))
        for name, ratio in log_ratios.items()
    ]


class Phase:
    """A verification that is run step by step."""

    def __init__(self, log_ratios: dict[str, float], device: NoisyDevice | None = None, **fields: Any) -> None:
        self.device, self.log_ratios = device or quiet(), log_ratios
        self.records = searched(self.device, log_ratios, **fields)
        self.verification = self.build(self.records)

    def build(self, records: list[TrialRecord]) -> Verification:
        baseline, *finalists = self.log_ratios
        return Verification(records, baseline, finalists, predict)

    def answer(self, run: Run, **changes: Any) -> TrialRecord:
        name = run.candidate.execution_identity
        record = self.device.measure(name, self.log_ratios[name], run.protocol, "verification", run.round)
        return record.model_copy(update=changes)

    def go(self, steps: int = 1000, remaining: float = math.inf, spoil: Callable[[Run], dict[str, Any]] = lambda _: {}):
        """Runs asked for until the end or for so many steps, and the end."""
        runs: list[Run] = []
        while len(runs) < steps:
            run = self.verification.ask(remaining)
            if isinstance(run, Done):
                return runs, run
            runs.append(run)
            record = self.answer(run, **spoil(run))
            self.records.append(record)
            self.verification.tell(record)
        return runs, None


def letters(runs: list[Run]) -> str:
    return "".join(run.candidate.execution_identity for run in runs)


class TestOrder:
    def test_pairs_go_forwards_and_backwards_so_that_a_drift_cancels(self) -> None:
        runs, _ = Phase({"A": 0.0, "B": 0.003}).go(6)
        assert letters(runs) == "ABBABA"
        runs, _ = Phase({"A": 0.0, "B": 0.05, "C": 0.051}).go(9)
        assert letters(runs) == "ABCCBACBA"

    def test_a_strong_drift_does_not_decide(self) -> None:
        told = verify(quiet(drift_per_hour=0.0), {"A": 0.0, "B": 0.0})
        device = quiet()
        device._drift = -0.01 / 60  # 1% a minute
        drifted = verify(device, {"A": 0.0, "B": 0.0})
        assert not told.outcome.verdicts["B"].differs
        assert not drifted.outcome.verdicts["B"].differs

    def test_quiet_executions_are_measured_by_the_references_protocol_and_noisy_ones_longer(self) -> None:
        runs, _ = Phase({"A": 0.0, "B": 0.05}).go(6)
        assert {run.protocol for run in runs} == {Protocol()}
        runs, _ = Phase({"A": 0.0, "B": 0.05}, quiet(half_range=0.016)).go(6)
        (protocol,) = {run.protocol for run in runs}
        assert protocol.version == "adaptive"
        assert 10 < protocol.least_seconds < 60

    def test_the_winner_and_the_baseline_run_under_a_minutes_load(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05, "C": 0.02})
        runs, done = phase.go()
        under_load = [run for run in runs if run.protocol.least_seconds == 60]
        assert sorted(letters(under_load)) == ["A", "B"]
        assert all(run.protocol.data_mode == "real" and run.protocol.warmup_updates == 20 for run in under_load)
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert done == Done("every comparison is decided")
        assert outcome.sustained_targets_per_second == pytest.approx(1.9e6 * math.exp(0.05), rel=0.01)
        assert outcome.baseline_sustained_targets_per_second == pytest.approx(1.9e6, rel=0.01)
        assert outcome.speedup is not None
        assert outcome.speedup.pairs == 4, "the pair under load is one of them"
        assert not outcome.load_disagrees

    def test_what_only_load_slows_is_said(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})

        def throttle(run: Run) -> dict[str, Any]:
            hot = run.protocol.least_seconds >= 60 and run.candidate.execution_identity == "B"
            return {"targets_per_second": 1.9e6} if hot else {}

        phase.go(spoil=throttle)
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.load_disagrees
        assert ", 1,900,000 targets/s under a minute's load, where the pair went otherwise (1.000x)" in outcome.reason

    @pytest.mark.parametrize(("slow", "name"), [("A", "the baseline"), ("B", "B")])
    def test_processes_that_something_slows_are_said(self, slow: str, name: str) -> None:
        phase = Phase({"A": 0.0, "B": 0.3})

        def busy(run: Run) -> dict[str, Any]:
            slowed = run.candidate.execution_identity == slow and run.round == 1
            return {"targets_per_second": 1.9e6 / 1.2 * (math.exp(0.3) if slow == "B" else 1)} if slowed else {}

        phase.go(spoil=busy)
        outcome = phase.verification.outcome()
        assert outcome is not None
        words = re.search(rf"; processes of {name} differ by (\d+)%, as where something else uses", outcome.reason)
        assert words is not None
        assert 18 <= int(words[1]) <= 22
        quiet_one = Phase({"A": 0.0, "B": 0.3})
        quiet_one.go()
        told = quiet_one.verification.outcome()
        assert told is not None
        assert "differ" not in told.reason

    def test_open_comparisons_get_more_rounds_without_those_that_are_decided(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.050, "C": 0.044, "D": 0.0}, NoisyDevice(seed=1))
        runs, _ = phase.go()
        assert letters(runs[:12]) == "ABCDDCBADCBA"
        later = letters(runs[14:])
        assert later.count("B") == later.count("C") == later.count("A") > 0
        assert "D" not in later
        assert max(run.round for run in runs) < MOST_PAIRS

    def test_every_process_has_a_name_of_its_own_and_runs_where_the_first_did(self) -> None:
        runs, _ = Phase({"A": 0.0, "B": 0.003}, NoisyDevice()).go()
        assert len({run.name for run in runs}) == len(runs)
        assert runs[0].name == "A-v1"
        assert [run.device for run in runs[:2]] == [None, "GPU-1"]


class TestTime:
    def test_what_does_not_fit_is_not_started(self) -> None:
        for budget in (5.0, 30.0, 70.0, 130.0, 250.0):
            device = quiet()
            ratios = {"A": 0.0, "B": 0.05}
            records = searched(device, ratios)
            verification = Verification(records, "A", ["B"], predict)
            begin = device.now
            while not isinstance(run := verification.ask(begin + budget - device.now), Done):
                name = run.candidate.execution_identity
                verification.tell(device.measure(name, ratios[name], run.protocol, "verification", run.round))
            assert device.now - begin <= budget
            assert run.budget_exhausted == (budget < 250)

    def test_the_reserve_is_enough_for_three_pairs_and_the_load(self) -> None:
        records = searched(quiet(), {"A": 0.0, "B": 0.05})
        reserve = reserve_seconds(predict, records[0], records[1], Protocol())
        told = verify(quiet(), {"A": 0.0, "B": 0.05}, budget_seconds=reserve)
        assert told.processes == 8
        assert told.outcome.sustained_targets_per_second is not None
        assert told.outcome.speedup is not None
        assert told.outcome.speedup.outcome == "faster"

    def test_a_verdict_without_a_minutes_load_says_so_and_the_end_says_why(self) -> None:
        enough = verify(quiet(), {"A": 0.0, "B": 0.05})
        assert "targets/s under a minute's load" in enough.outcome.reason
        short = verify(quiet(), {"A": 0.0, "B": 0.05}, budget_seconds=7 * predict({}, Protocol()))
        assert short.outcome.speedup is not None
        assert "3 pairs of processes, not measured under a minute's load" in short.outcome.reason
        assert short.reason == "budget: no time for the winner and the baseline under a minute's load"
        small = verify(quiet(), {"A": 0.0, "B": 0.05}, at_stake_seconds=20 * predict({}, Protocol()))
        assert "not measured under a minute's load" in small.outcome.reason
        assert small.reason == "a minute's load costs more than it may of the planned trainings"

    def test_with_little_time_the_last_finalists_stay_out_rather_than_pairs(self) -> None:
        each = predict({}, Protocol())
        told = verify(quiet(), {"A": 0.0, "B": 0.05, "C": 0.051, "D": 0.049}, budget_seconds=9.5 * each)
        assert list(told.verification.withdrawn) == ["D"]
        assert {verdict.pairs for verdict in told.outcome.verdicts.values()} == {3}

    @pytest.mark.parametrize("budget", [75.0, 120.0, 200.0, 320.0])
    def test_with_little_time_noisy_windows_are_fewer_rather_than_pairs(self, budget: float) -> None:
        device = quiet(half_range=0.016)
        phase = Phase({"A": 0.0, "B": 0.05}, device)
        begin = device.now
        runs: list[Run] = []
        while not isinstance(run := phase.verification.ask(begin + budget - device.now), Done):
            runs.append(run)
            phase.verification.tell(phase.answer(run))
        assert device.now - begin <= budget
        assert len(runs) >= 6
        assert len({run.protocol for run in runs[:2]}) == 1, "both sides of a pair are measured alike"
        assert (runs[0].protocol.version == 2) == (budget < 100)

    def test_three_short_rounds_go_before_a_long_one(self) -> None:
        """Here a process takes 10.6 s by the study's protocol, and 7.2 s at the least."""
        told = verify(quiet(), {"A": 0.0, "B": 0.05}, budget_seconds=50.0)
        assert (told.outcome.verdicts["B"].pairs, told.outcome.verdicts["B"].outcome) == (3, "faster")
        phase = Phase({"A": 0.0, "B": 0.05})
        runs, _ = phase.go(2, remaining=50.0)
        assert {(run.protocol.version, run.protocol.windows, run.protocol.most_windows) for run in runs} == {
            ("adaptive", 3, 3)
        }
        runs, _ = Phase({"A": 0.0, "B": 0.05}).go(2, remaining=65.0)
        assert {run.protocol for run in runs} == {Protocol()}, "the study's own where there is time for it"

    def test_without_time_for_three_rounds_none_begins_and_nothing_is_claimed(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})
        runs, done = phase.go(remaining=40.0)
        assert runs == []
        assert done == Done("budget: 3 pairs of processes need up to 43 s", True)
        assert phase.verification.outcome() is None

    def test_short_rounds_are_begun_by_what_they_are_expected_to_take(self) -> None:
        """A process may take 7.2 s at most and is expected to take half: six end in 43.2 s, and in 25.2 s as a rule."""
        for remaining, begins in ((25.3, True), (25.1, False)):
            phase = Phase({"A": 0.0, "B": 0.05})
            phase.verification = Verification(
                phase.records, "A", ["B"], predict, expect=lambda *asked: predict(*asked) / 2
            )
            runs, _ = phase.go(1, remaining=remaining)
            assert bool(runs) == begins

    def test_fewer_than_three_pairs_say_nothing(self) -> None:
        """As where a study is ended in mid-verification."""
        phase = Phase({"A": 0.0, "B": 0.05})
        phase.go(5)
        assert len(phase.verification.pairs("B", "A")) == 2
        assert phase.verification.outcome() is None
        phase.go(1)
        assert phase.verification.outcome() is not None

    def test_no_more_is_spent_on_an_open_comparison_than_it_is_worth(self) -> None:
        """Later rounds together cost at most what taking the wrong one would."""
        spent = {}
        for hours in (0.01, 20.0, math.inf):
            told = verify(NoisyDevice(seed=2), {"b": 0.0, "c": 0.004}, at_stake_seconds=hours * 3600)
            spent[hours] = told.seconds
            if hours == 0.01:
                assert len(told.verification.pairs("c", "b")) == 3
                assert "is worth 0 s of the planned trainings" in told.reason
        assert spent[0.01] < spent[20.0] <= spent[math.inf]
        assert spent[20.0] - spent[0.01] < 0.02 * 20 * 3600


class TestFailures:
    def test_a_process_that_fails_is_tried_once_more(self) -> None:
        failures = iter([{"fate": Fate.LOST, "reason": "its node went away"}])
        phase = Phase({"A": 0.0, "B": 0.05})
        runs, done = phase.go(spoil=lambda run: next(failures, {}))
        assert letters(runs[:4]) == "AABB"
        assert runs[1].name == "A-v1-again"
        assert done == Done("every comparison is decided")

    def test_a_finalist_that_fails_twice_is_out(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05, "C": 0.02})
        broken = {"fate": Fate.OUT_OF_MEMORY, "reason": "3 GiB", "targets_per_second": None}
        runs, _ = phase.go(spoil=lambda run: broken if run.candidate.execution_identity == "B" else {})
        assert letters(runs).count("B") == 2
        assert phase.verification.withdrawn == {"B": "failed in the verification: 3 GiB"}
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.selected.execution_identity == "C"

    def test_without_a_baseline_or_finalist_there_is_an_end(self) -> None:
        broken = {"fate": Fate.FAILED, "reason": "no", "targets_per_second": None}
        for name, words in (("A", "the baseline cannot be verified: failed"), ("B", "no finalist is left")):
            phase = Phase({"A": 0.0, "B": 0.05})
            _, done = phase.go(spoil=lambda run, name=name: broken if run.candidate.execution_identity == name else {})
            assert done.reason.startswith(words)
            assert phase.verification.outcome() is None
        records = searched(quiet(), {"A": 0.0, "B": 0.05})
        assert Verification(records, "A", [], predict).ask(1e9).reason.startswith("the baseline is the best")
        assert Verification(records[1:], "A", ["B"], predict).ask(1e9).reason.startswith("the baseline has no figure")

    @pytest.mark.parametrize("gain", [0.05, 0.0, -0.05])
    def test_a_baseline_that_fails_after_a_few_rounds_leaves_their_verdict(self, gain: float) -> None:
        phase = Phase({"A": 0.0, "B": gain})
        broken = {"fate": Fate.LOST, "reason": "its node went away", "targets_per_second": None}
        phase.go(6)
        _, done = phase.go(spoil=lambda run: broken if run.candidate.execution_identity == "A" else {})
        if "A" in phase.verification.withdrawn:
            assert done.reason.startswith("the baseline cannot be verified")
        outcome = phase.verification.outcome()
        if gain > 0:
            assert "A" in phase.verification.withdrawn, "it was to run under load"
            assert outcome is not None
            assert outcome.selected.execution_identity == "B"
            assert outcome.speedup is not None
            assert outcome.speedup.pairs == 3

    def test_a_baseline_that_is_out_wins_nothing(self) -> None:
        """Not even a tie, as one that did not run at last."""
        phase = Phase({"A": 0.0, "B": 0.0, "C": -0.2})
        phase.go(9)
        phase.verification.withdrawn["A"] = "failed in the verification: lost"
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.selected.execution_identity == "B"
        phase.verification.withdrawn["B"] = "failed in the verification: lost"
        assert phase.verification.outcome() is None, "C is slower than what it was compared with"

    def test_a_process_on_another_device_makes_no_pair(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})
        elsewhere = a_record("x", device="GPU-2").devices
        moved = iter([{}, {"devices": elsewhere}])
        runs, _ = phase.go(spoil=lambda run: next(moved, {}))
        assert letters(runs[:4]) == "ABBB"
        assert not phase.verification.withdrawn


class TestSeveralDevices:
    """The search ran the finalist on GPU-2 and the others elsewhere."""

    @staticmethod
    def phase() -> Phase:
        elsewhere = {"devices": a_record("x", device="GPU-2").devices}
        return Phase({"A": 0.0, "B": 0.05}, B=elsewhere)

    def test_pairs_are_made_where_the_choice_ran_as_its_compilation_is_there(self) -> None:
        phase = self.phase()
        there = {"devices": a_record("x", device="GPU-2").devices}
        runs, done = phase.go(spoil=lambda run: there)
        assert {run.device for run in runs} == {"GPU-2"}
        assert done == Done("every comparison is decided")

    def test_a_device_of_an_earlier_session_that_is_gone_costs_nothing(self) -> None:
        """The cluster knows no place for it, and starts the process where there is one."""
        phase = self.phase()
        assert phase.verification.ask(math.inf).device == "GPU-2"  # type: ignore[union-attr]
        phase = self.phase()
        here = {"devices": a_record("x", device="GPU-3").devices}
        runs, done = phase.go(spoil=lambda run: here)
        assert letters(runs) == "ABBABAAB"
        assert [run.device for run in runs] == ["GPU-2", *["GPU-3"] * 7]
        assert phase.verification.withdrawn == {}
        assert done == Done("every comparison is decided")

    def test_a_device_that_goes_away_costs_the_round_and_not_the_verdict(self) -> None:
        phase = self.phase()

        def spoil(run: Run) -> dict[str, Any]:
            if run.name == "B-v2":
                return {"fate": Fate.LOST, "reason": "its node went away", "devices": []}
            return {"devices": a_record("x", device="GPU-2" if run.round < 2 else "GPU-1").devices}

        runs, done = phase.go(spoil=spoil)
        assert letters(runs[:5]) == "ABBBA", "the round that was broken off begins anew"
        assert [run.device for run in runs[:5]] == ["GPU-2", "GPU-2", "GPU-2", None, "GPU-1"]
        assert {run.device for run in runs[5:]} == {"GPU-1"}
        assert done == Done("every comparison is decided")
        assert len(phase.verification.pairs("B", "A")) == 4


class TestResumed:
    def test_whole_rounds_count_and_half_ones_do_not(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})
        phase.go(5)
        resumed = phase.build(phase.records)
        assert len(resumed.pairs("B", "A")) == 2
        phase.verification = resumed
        runs, _ = phase.go()
        assert {run.round for run in runs} == {3, 4}
        assert len(phase.build(phase.records).pairs("B", "A")) == 4, "no number is given twice"

    def test_a_round_that_was_broken_off_before_its_baseline_is_none_of_the_three(self) -> None:
        """The second round runs backwards: its two finalists were measured, and make no pair with the baseline."""
        phase = Phase({"A": 0.0, "B": 0.05, "C": 0.02})
        runs, _ = phase.go(5)
        assert letters(runs) == "ABCCB"
        phase.verification = phase.build(phase.records)
        phase.go()
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.selected.execution_identity == "B"
        assert outcome.verdicts["B"].pairs >= 3

    def test_a_finalist_that_was_found_since_gets_its_pairs(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})
        phase.go()
        phase.log_ratios = {"A": 0.0, "C": 0.06, "B": 0.05}
        phase.records += searched(phase.device, {"C": 0.06})
        phase.verification = phase.build(phase.records)
        runs, _ = phase.go()
        outcome = phase.verification.outcome()
        assert letters(runs).count("C") >= 3
        assert outcome is not None
        assert outcome.verdicts["C"].pairs >= 3
        assert outcome.selected.execution_identity == "C"

    def test_a_finalist_that_was_found_since_costs_no_verdict_where_there_is_no_time(self) -> None:
        phase = Phase({"A": 0.0, "B": 0.05})
        phase.go()
        phase.log_ratios = {"A": 0.0, "C": 0.06, "B": 0.05}
        phase.records += searched(phase.device, {"C": 0.06})
        phase.verification = phase.build(phase.records)
        assert phase.go(remaining=0.0)[0] == []
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.selected.execution_identity == "B"

    def test_rounds_over_two_devices_or_protocols_are_no_pairs(self) -> None:
        records = searched(quiet(), {"A": 0.0, "B": 0.05})
        one = quiet().measure("A", 0.0, Protocol(), "verification", 0)
        other = quiet().measure("B", 0.0, Protocol(), "verification", 0)
        for spoiled in (
            other.model_copy(update={"devices": a_record("x", device="GPU-2").devices}),
            other.model_copy(update={"protocol": Protocol(windows=5)}),
            other.model_copy(update={"fate": Fate.DOMINATED}),
        ):
            assert Verification([*records, one, spoiled], "A", ["B"], predict).pairs("B", "A") == []
        assert len(Verification([*records, one, other], "A", ["B"], predict).pairs("B", "A")) == 1


class TestSelection:
    def test_the_fastest_wins_where_it_is_shown_to_be(self) -> None:
        told = verify(quiet(), {"A": 0.0, "B": 0.05, "C": 0.02})
        assert told.outcome.selected.execution_identity == "B"
        assert told.outcome.ties == ()
        assert told.outcome.reason.startswith("B: 1.05")

    def test_a_tie_goes_to_the_sooner_start_then_to_the_smaller_memory(self) -> None:
        times = {"A": 20.0, "B": 130.0, "C": 20.0, "D": 20.0}
        sizes = {"A": 5, "B": 5, "C": 9, "D": 5}
        fields = {
            name: {"seconds": Seconds(start=1.0, compile=times[name]), "memory": Memory(used_bytes=sizes[name])}
            for name in times
        }
        phase = Phase({"A": 0.0, "B": 0.051, "C": 0.050, "D": 0.050}, **fields)
        for record in phase.records:
            record.__dict__["execution"] = {"micro_batch_size": record.execution_identity}
        phase.go()
        outcome = phase.verification.outcome()
        assert outcome is not None
        assert outcome.selected.execution_identity == "D"
        assert {record.execution_identity for record in outcome.ties} == {"B", "C"}
        assert "a tie with" in outcome.reason

    def test_what_starts_take_longer_than_speed_saves_is_not_selected(self) -> None:
        """C is 1.2% faster than B, which saves 6 ns a target, and its starts take 15 ns a target longer."""
        for lags, selected in (({}, "C"), ({"C": 15e-9}, "B"), ({"B": 50e-9, "C": 50e-9}, "A")):
            phase = Phase({"A": 0.0, "B": 0.05, "C": 0.062})
            phase.verification = Verification(phase.records, "A", ["B", "C"], predict, lags=lags)
            phase.go()
            outcome = phase.verification.outcome()
            assert outcome is not None
            assert outcome.selected.execution_identity == selected
            assert outcome.verdicts["C"].ratio == pytest.approx(math.exp(0.062), rel=0.005), "of throughput alone"
            assert ("C takes longer for its starts than its speed saves" in outcome.reason) == bool(lags)
            assert ("nothing is shown to be done sooner" in outcome.reason) == (selected == "A")

    def test_where_nothing_is_faster_the_baseline_stays(self) -> None:
        told = verify(quiet(), {"A": 0.0, "B": -0.02})
        assert told.outcome.selected.execution_identity == "A"
        assert told.outcome.speedup is None
        assert "nothing is shown to be faster" in told.outcome.reason

    def test_one_that_is_shown_to_be_slower_than_the_baseline_is_not_taken_for_its_start(self) -> None:
        """It ties with the fastest only because that one is noisy."""
        logs = {"A": [0.0] * 4, "B": [-0.015] * 4, "C": [0.03, -0.03, 0.04, -0.02]}
        times = {"A": 20.0, "B": 1.0, "C": 20.0}
        members = {
            name: a_record(name, seconds=Seconds(start=1.0, compile=times[name]), targets_per_second=1.0)
            for name in logs
        }

        def side(log: float) -> Side:
            return Side(1e6 * math.exp(log), 0.001)

        def pairs(one: str, other: str) -> list[Pair]:
            return [Pair(side(mine), side(its)) for mine, its in zip(logs[one], logs[other], strict=True)]

        for record in members.values():
            record.__dict__["execution"] = {"micro_batch_size": record.execution_identity}
        evidence = Evidence("A", members, pairs, lambda name: None, list(members.values()), 2, CAUTIOUS_SPREAD)
        outcome = conclude(evidence)
        assert outcome is not None
        assert outcome.verdicts["B"].outcome == "slower"
        assert {record.execution_identity for record in outcome.ties} >= {"B"}
        assert outcome.selected.execution_identity != "B"

    def test_finalists_are_those_near_the_fastest_and_the_one_that_starts_soonest(self) -> None:
        device = quiet(process_spread=0.0, half_range=0.0)
        ratios = {"A": 0.0, "B": 0.051, "C": 0.050, "D": 0.049, "E": 0.048, "F": 0.0}
        fields = {name: {"seconds": Seconds(start=1.0, compile=1.0 if name == "E" else 20.0)} for name in ratios}
        records = searched(device, ratios, **fields)
        for record in records:
            record.__dict__["execution"] = {"micro_batch_size": record.execution_identity}
        lucky = device.measure("A", 0.2, Protocol())
        assert choose_finalists([*records, lucky], "A") == ["B", "E", "C"]
        assert choose_finalists(records[:1], "A") == []
        assert choose_finalists([], "A") == []


class TestPower:
    """Small versions of tests/benchmarks/verification_power.py, whose figures are the ones to go by."""

    @staticmethod
    def studies(planted: float, count: int, **noise: float) -> list[Told]:
        ratios = {"A": 0.0, "B": math.log1p(-planted)}
        return [verify(NoisyDevice(seed=seed, **noise), ratios) for seed in range(count)]

    @pytest.mark.parametrize("process_spread", [0.0025, 0.005])
    def test_planted_slowdowns_are_found(self, process_spread: float) -> None:
        for planted, share in ((0.02, 0.95), (0.01, 0.70)):
            told = self.studies(planted, 60, process_spread=process_spread)
            assert sum(one.outcome.verdicts["B"].outcome == "slower" for one in told) >= 60 * share

    @pytest.mark.parametrize("process_spread", [0.001, 0.0025, 0.005])
    def test_equals_are_seldom_called_different_and_intervals_cover(self, process_spread: float) -> None:
        verdicts = [one.outcome.verdicts["B"] for one in self.studies(0.0, 100, process_spread=process_spread)]
        assert sum(verdict.differs for verdict in verdicts) <= 5
        assert sum(verdict.low <= 1 <= verdict.high for verdict in verdicts) >= 85

    def test_repeats_of_a_control_make_a_noisy_machine_no_less_honest(self) -> None:
        control = [math.exp(0.03 * value) for value in (0.1, -1.2, 0.8, 1.1, -0.4, -0.9, 0.7)]
        spread = learned_spread([control], CAUTIOUS_SPREAD)
        assert spread.value > 0.015
        wrong = covered = 0
        for seed in range(60):
            told = verify(NoisyDevice(process_spread=0.03, seed=seed), {"A": 0.0, "B": 0.0}, spread=spread)
            wrong += told.outcome.verdicts["B"].differs
            covered += told.outcome.verdicts["B"].low <= 1 <= told.outcome.verdicts["B"].high
        assert wrong <= 3
        assert covered >= 51


def test_the_simulated_seconds_are_those_of_its_processes() -> None:
    told = verify(quiet(), {"A": 0.0, "B": 0.05})
    assert told.seconds == pytest.approx(8 * START_SECONDS + 6 * 3 * 1.7 + 2 * 60)
    assert Spread().value < CAUTIOUS_SPREAD.value
