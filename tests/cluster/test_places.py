"""How a candidate comes to the place it has to run in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock
from test_searcher import Script

from tinyllm_ray.cluster.places import ELSEWHERE, HOLD_SECONDS, Hold, Placing
from tinyllm_ray.cluster.searcher import CandidateSearcher


class Driver(Script):
    """Its candidates have to run at `there`."""

    def __init__(self, candidates: int = 2) -> None:
        super().__init__(candidates)
        self.waiting = [{**request, "place": "node/there"} for request in self.waiting]
        self.heard: list[tuple[str, str]] = []

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        self.heard.append((candidate, event["event"]))


def searcher_over(driver: Driver, devices: int, alive: bool = True) -> CandidateSearcher:
    first = driver.ask()
    assert first is not None
    searcher = CandidateSearcher(driver, first, devices, Path("logs"), None)
    searcher._placing = Placing(devices, is_there=lambda place: alive and place == "node/there")
    return searcher


def says(event: str, place: str = "node/here") -> dict[str, Any]:
    return {"event": json.dumps({"event": event, "record": {}, "place": place})}


def candidate_of(answer: Any) -> str:
    assert isinstance(answer, dict)
    return str(answer["request"]["candidate"])


def test_a_candidate_that_is_elsewhere_is_tried_again_while_the_device_is_held() -> None:
    driver = Driver()
    searcher = searcher_over(driver, devices=3)
    for number in range(2):
        assert candidate_of(searcher.suggest(f"wrong {number}")) == "c0"
        searcher.on_trial_result(f"wrong {number}", says(ELSEWHERE))
        searcher.on_trial_result(f"wrong {number}", says(ELSEWHERE))
    assert candidate_of(searcher.suggest("right")) == "c0"
    assert searcher.suggest("another") is None, "two devices are held, and one is at work"
    searcher.on_trial_result("right", says("forked"))
    searcher.on_trial_complete("right", says("record"))
    assert driver.heard == [("c0", "forked"), ("c0", "record")]
    assert driver.lost == []
    assert candidate_of(searcher.suggest("next")) == "c1"


def test_a_device_is_given_back_without_a_word_to_the_study() -> None:
    driver = Driver()
    searcher = searcher_over(driver, devices=2)
    searcher.suggest("wrong")
    searcher.on_trial_result("wrong", says(ELSEWHERE))
    searcher.suggest("right")
    searcher.on_trial_complete("wrong", error=True)
    assert (driver.lost, driver.heard) == ([], [])
    assert candidate_of(searcher.suggest("beside")) == "c1", "there is room again"


def test_a_place_that_is_held_for_another_candidate_is_waited_for() -> None:
    """The one before had to run here, and held the device there; that is no place that is gone."""
    driver = Driver()
    driver.waiting[0] = {**driver.waiting[0], "place": "node/here"}
    searcher = searcher_over(driver, devices=2)
    searcher._most_at_once = 3  # where a device is free, the place that is wanted is not that one
    searcher._placing = Placing(2, is_there=lambda place: True)
    searcher.suggest("there")
    searcher.on_trial_result("there", says(ELSEWHERE, "node/there"))
    searcher.suggest("here")
    searcher.on_trial_complete("here", says("record"))
    assert candidate_of(searcher.suggest("here again")) == "c1"
    searcher.on_trial_result("here again", says(ELSEWHERE, "node/here"))
    assert driver.lost == []
    assert searcher.suggest("not yet") is None
    assert not searcher.is_over()
    searcher.on_trial_complete("there", error=True)
    assert candidate_of(searcher.suggest("there at last")) == "c1"


@pytest.mark.parametrize(("devices", "alive"), [(3, False), (1, True)])
def test_a_place_that_is_gone_loses_the_candidate(devices: int, alive: bool) -> None:
    driver = Driver()
    searcher = searcher_over(driver, devices, alive)
    searcher.suggest("wrong")
    searcher.on_trial_result("wrong", says(ELSEWHERE))
    assert driver.lost == ["c0"]


def test_the_end_of_a_study_waits_for_no_device_that_is_held() -> None:
    driver = Driver(candidates=1)
    searcher = searcher_over(driver, devices=2)
    searcher.suggest("wrong")
    searcher.on_trial_result("wrong", says(ELSEWHERE))
    assert not searcher.is_over(), "its candidate has not run"
    searcher.suggest("right")
    searcher.on_trial_complete("right", says("record"))
    assert searcher.suggest("more") == searcher.FINISHED
    assert searcher.is_over()


def test_a_hold_ends_so_that_its_process_is_not_used_again() -> None:
    clock = FakeClock(0.0)
    hold = Hold(clock, clock.advance)
    while clock() < HOLD_SECONDS:
        assert hold.step() == {"event": ELSEWHERE}
    with pytest.raises(RuntimeError, match="not the one asked for"):
        hold.step()
