import math
from typing import Any

import pytest
from study_replay import fitted, record

from tinyllm_ray.records import Fate, Memory, Seconds, TrialRecord
from tinyllm_ray.search.candidate import make_candidate
from tinyllm_ray.search.rates import fastest, rate
from tinyllm_ray.search.verdict import select

SPACE = fitted()


def measured(
    number: int, *rates: float, start: float | None = 1.0, first: float | None = 1.0, **fields: Any
) -> TrialRecord:
    fields = {"seconds": Seconds(start=start, compile=first), **fields}
    return record(make_candidate(number, SPACE.settle({"micro_batch_size": number})), rates=rates, **fields)


def test_nothing_complete_is_no_verdict() -> None:
    failed = record(make_candidate(1, SPACE.baseline), Fate.INVALID, rates=(9.0,))
    assert select([]) is None
    assert select([failed]) is None
    assert fastest([failed]) is None


def test_the_fastest_wins_outside_the_noise() -> None:
    slow, fast = measured(1, 99.0, 100.0, 101.0), measured(2, 101.0, 102.0, 103.0, first=90.0)
    verdict = select([slow, fast])
    assert verdict is not None
    assert verdict.record is fast
    assert verdict.ties == ()
    assert "2.0% ahead of c01" in verdict.reason


def test_inside_the_noise_of_either_a_tie_goes_to_the_cheaper_start() -> None:
    cheap, dear = measured(1, 99.0, 100.0, 101.1), measured(2, 101.0, 101.0, 101.0, first=90.0)
    verdict = select([dear, cheap])
    assert verdict is not None
    assert verdict.record is cheap
    assert verdict.ties == (dear,)
    assert "starts sooner" in verdict.reason
    assert fastest([dear, cheap]) is dear


def test_noise_is_judged_against_the_fastest_and_not_passed_on() -> None:
    """100 is within 1.5 of 101, and 101 of 102, but 100 is not within 1.5 of 102."""
    chain = [
        measured(n, rate - 1.5, rate, rate + 1.5, first=10.0 * n) for n, rate in [(1, 100.0), (2, 101.0), (3, 102.0)]
    ]
    verdict = select(chain)
    assert verdict is not None
    assert verdict.record is chain[1]
    assert verdict.ties == (chain[2],)


@pytest.mark.parametrize(
    ("memory", "other"),
    [
        (Memory(peak_reserved_bytes=5), Memory(peak_reserved_bytes=6)),
        (Memory(peak_reserved_bytes=5, used_bytes=9), Memory(peak_reserved_bytes=6, used_bytes=1)),
        (Memory(used_bytes=5), Memory(used_bytes=6)),
        (Memory(used_bytes=5), Memory()),
    ],
)
def test_equal_starts_go_to_the_smaller_memory(memory: Memory, other: Memory) -> None:
    small = measured(1, 99.0, 100.0, 101.0, first=1.4, memory=memory)
    large = measured(2, 99.5, 100.5, 101.5, first=1.0, memory=other)
    for order in ([small, large], [large, small]):
        verdict = select(order)
        assert verdict is not None
        assert verdict.record is small
        assert verdict.ties == (large,)


def test_an_unknown_start_wins_no_tie() -> None:
    unknown, known = measured(1, 99.0, 100.0, 101.0, first=None), measured(2, 98.0, 99.5, 101.0, first=90.0)
    verdict = select([unknown, known])
    assert verdict is not None
    assert verdict.record is known
    told = measured(1, 99.0, 100.0, 101.0, first=None, first_update_seconds=3.0)
    assert select([told, known]).record is told  # type: ignore[union-attr]


def test_one_window_has_no_noise() -> None:
    verdict = select([measured(1, 100.0), measured(2, 100.1, first=90.0)])
    assert verdict is not None
    assert verdict.record.candidate.startswith("c02")


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0])
def test_a_throughput_that_is_no_number_never_wins(value: float | None) -> None:
    good = measured(1, 10.0)
    # Built without validation, as a record that some other program wrote might be.
    broken = TrialRecord.model_construct(**dict(measured(2, 99.0, 100.0, 101.0)) | {"targets_per_second": value})
    assert rate(broken) is None
    for order in ([good, broken], [broken, good]):
        assert fastest(order) is good
        verdict = select(order)
        assert verdict is not None
        assert verdict.record is good
        assert verdict.ties == ()


def test_nothing_slower_than_a_tied_baseline_is_taken() -> None:
    """Windows this noisy tie everything; the cheapest start is 25% slower than the baseline."""
    base, slower, faster = (
        measured(1, 60.0, 100.0, 140.0, first=3.0),
        measured(2, 75.0),
        measured(3, 70.0, 110.0, 150.0, first=9.0),
    )
    verdict = select([base, slower, faster], baseline=base.execution_identity)
    assert verdict is not None
    assert verdict.record is base
    assert verdict.ties == (faster, slower)
    without = select([base, slower, faster])
    assert without is not None
    assert without.record is slower


def test_a_shared_compilation_counts_cold_for_all_that_share_it() -> None:
    """The thread count of the second is no reason for its quick start: it found the first one's compilation."""
    execution = SPACE.settle({"micro_batch_size": 8})
    cold, warm = (
        record(
            make_candidate(number, {**execution, "cpu_threads": number}),
            rates=(99.0, 100.0, 101.0),
            seconds=Seconds(start=1.0, compile=seconds),
        )
        for number, seconds in ((1, 20.0), (2, 3.0))
    )
    other = measured(4, 99.5, 100.5, 101.5, first=10.0)
    verdict = select([cold, warm, other])
    assert verdict is not None
    assert verdict.record is other
    assert "starts sooner" in verdict.reason


def test_the_baseline_is_kept_where_nothing_is_gained() -> None:
    base, faster = (
        measured(1, 99.0, 100.0, 101.0, memory=Memory(used_bytes=102)),
        measured(2, 99.5, 100.5, 101.5, memory=Memory(used_bytes=100)),
    )
    verdict = select([base, faster], baseline=base.execution_identity)
    assert verdict is not None
    assert verdict.record is base
    assert "the baseline" in verdict.reason


def test_noisy_windows_do_not_make_a_slow_candidate_a_winner() -> None:
    """Its windows reach far above the fastest, its median lies below the baseline, which is outside the tie."""
    base = measured(1, 1000.0, 1005.0, 1010.0)
    fast = measured(2, 1200.0, 1205.0, 1210.0, first=20.0)
    wild = measured(3, 40.0, 620.0, 1340.0, first=0.5)
    verdict = select([base, fast, wild], baseline=base.execution_identity)
    assert verdict is not None
    assert verdict.record is fast


def test_a_trial_cut_before_its_first_update_says_nothing_about_its_compilation() -> None:
    execution = SPACE.settle({"micro_batch_size": 8})
    whole, lost = (
        record(
            make_candidate(number, {**execution, "cpu_threads": number}),
            fate,
            rates=(99.0, 100.0, 101.0),
            seconds=Seconds(start=1.0, compile=seconds),
        )
        for number, fate, seconds in ((1, Fate.COMPLETE, 20.0), (2, Fate.LOST, None))
    )
    dear = measured(4, 99.5, 100.5, 101.5, first=130.0)
    verdict = select([whole, lost, dear])
    assert verdict is not None
    assert verdict.record is whole


def peak(share: float) -> dict[str, Any]:
    return {"memory": Memory(peak_reserved_bytes=int(100e9 * share), used_bytes=None, total_bytes=int(100e9))}


def test_one_that_fills_the_memory_does_not_win_a_tie_and_its_reason_says_so() -> None:
    """It starts as soon as the other; a run of hours may need what it leaves."""
    full, roomy = (
        measured(1, 99.0, 101.0, 103.0, **peak(0.975)),
        measured(2, 99.0, 100.0, 101.0, first=90.0, **peak(0.9)),
    )
    verdict = select([full, roomy])
    assert verdict is not None
    assert verdict.record is roomy
    assert verdict.ties == (full,)
    assert f"{full.candidate} leaves less than 3% of the memory free" in verdict.reason


def test_one_that_fills_the_memory_wins_alone_and_among_its_like_with_a_warning() -> None:
    full, slow = measured(1, 149.0, 150.0, 151.0, **peak(0.975)), measured(2, 99.0, 100.0, 101.0, **peak(0.5))
    for records in ([full, slow], [full, measured(3, 149.0, 150.0, 151.0, first=90.0, **peak(0.98))]):
        verdict = select(records)
        assert verdict is not None
        assert verdict.record is full
        assert verdict.reason.endswith("it leaves less than 3% of the memory free, which a long run may need")


def test_memory_that_is_not_known_is_not_full() -> None:
    unknown, roomy = measured(1, 99.0, 101.0, 103.0), measured(2, 99.0, 100.0, 101.0, first=90.0, **peak(0.9))
    verdict = select([unknown, roomy])
    assert verdict is not None
    assert verdict.record is unknown
    assert "memory free" not in verdict.reason


def test_the_doubt_about_two_devices_makes_a_tie_of_what_it_covers() -> None:
    slow, fast = measured(1, 100.0, 100.0, 100.0), measured(2, 102.0, 102.0, 102.0, first=90.0)
    for doubt, chosen in ((0.01, fast), (0.03, slow)):
        verdict = select([slow, fast], doubt=lambda one, other, doubt=doubt: 0.0 if one is other else doubt)
        assert verdict is not None
        assert verdict.record is chosen
