"""The simulated fleet, and the driver's own cost: what their figures rest on."""

import pytest
from driver_limit import STEPS, drive
from replay import scenarios
from replay_devices import GPUS_A_NODE, Fleet, decide
from replay_factorial import KERNELS, factorial

from tinyllm_ray.search.answers import Trial
from tinyllm_ray.search.study import Study

SMALL = factorial("three kernels 4", 4, KERNELS[:3])
MANY = scenarios(SMALL)[2]


@pytest.mark.slow
def test_more_gpus_decide_sooner_and_measure_nothing_twice() -> None:
    one, four, sixteen = (decide(SMALL, 0, gpus, MANY) for gpus in (1, 4, 16))
    assert one.seconds > four.seconds >= 0.9 * sixteen.seconds
    assert one.held_hours == one.returned_hours < sixteen.returned_hours < sixteen.held_hours
    assert (one.used_gpus, four.used_gpus) == (1, 4)
    assert [made.repeated for made in (one, four, sixteen)] == [0, 0, 0]
    assert [made.regret for made in (one, four, sixteen)] == [0, 0, 0], "GPUs that differ by 2% mislead nobody"
    assert decide(SMALL, 0, 4, MANY) == four


def test_a_gpu_holds_one_trial_and_a_node_shares_its_compile_cache() -> None:
    fleet = Fleet(SMALL, 0, GPUS_A_NODE + 1)
    assert len(fleet.machines) == 2
    asked = Study(SMALL.space).ask(1e6)
    assert isinstance(asked, Trial)
    for _ in range(GPUS_A_NODE + 1):
        fleet.start(asked, now=30.0)
    assert fleet.free == []
    ends = sorted((gpu, end - 30.0) for end, gpu, _ in fleet.running)
    (_, cold), *warm, (_, other) = ends
    assert all(seconds < cold / 2 for _, seconds in warm)
    assert other == pytest.approx(cold, rel=0.5), "the second node compiles for itself"
    now, record = fleet.next_end()
    assert now == 30.0 + (record.seconds.total or 0.0)
    assert record.devices[0].identifier == str(fleet.free[0])
    fleet.hand_back(now)
    assert fleet.returned == {}, "as many trials as there are GPUs ran at once"
    fleet.peak = 1
    while fleet.running:
        now, _ = fleet.next_end()
    fleet.hand_back(now)
    assert fleet.returned == {1: now}
    assert fleet.used_seconds(now + 10) == pytest.approx(GPUS_A_NODE * (now + 10) + now)


def test_the_driver_is_driven_through_whole_trials() -> None:
    told = drive(trials=3, at_once=2)
    assert len(told) == 3
    assert all(set(STEPS) <= set(steps) for steps in told)
