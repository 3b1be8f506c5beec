"""What Tune is handed: how many candidates at once, and how little crosses to their processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle
from scripted_driver import ScriptedDriver, tiny_request

from tinyllm_ray.cluster.searcher import CandidateSearcher
from tinyllm_ray.cluster.trials import CandidateTrial
from tinyllm_ray.data.cache import TokenCache

SHORT = {"warmup_updates": 1, "windows": 1, "updates_per_window": 1}


class Script(ScriptedDriver):
    """Notes which candidates were lost."""

    def __init__(self, candidates: int, cache: TokenCache | None = None) -> None:
        super().__init__([tiny_request(number, {}, SHORT, cache) for number in range(candidates)])
        self.lost: list[str] = []

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        raise AssertionError("nothing was said")

    def lose(self, candidate: str) -> None:
        self.lost.append(candidate)


def searcher_over(driver: Script, most_at_once: int) -> CandidateSearcher:
    first = driver.ask()
    assert first is not None
    return CandidateSearcher(driver, first, most_at_once, Path("logs"), "servers")


def test_no_more_run_at_once_than_devices_whatever_ends_them() -> None:
    """Two timed on one device would spoil each other's figures; the limit is no state that a resumption could lose."""
    script = Script(candidates=5)
    searcher = searcher_over(script, most_at_once=1)
    for number in range(5):
        started = searcher.suggest(f"trial {number}")
        assert isinstance(started, dict)
        assert started["request"]["candidate"] == f"c{number}"
        assert searcher.suggest("another") is None
        searcher.on_trial_complete(f"trial {number}", error=True)
    assert script.lost == [f"c{number}" for number in range(5)]
    assert searcher.suggest("another") == searcher.FINISHED


def test_what_tune_gave_up_without_a_word_is_lost() -> None:
    script = Script(candidates=3)
    searcher = searcher_over(script, most_at_once=2)
    searcher.suggest("running")
    searcher.suggest("pending")
    searcher.lose_the_rest()
    searcher.lose_the_rest()
    assert script.lost == ["c0", "c1"]


def test_a_trial_is_shipped_names_and_no_tokens(make_cache: Any) -> None:
    """gRPC ends at 512 MB, and an object reference at the end of its process; a cache crosses as its folder's name."""
    cache = make_cache([number % 100 for number in range(1_000_000)], shard_tokens=100_000)
    searcher = searcher_over(Script(candidates=1, cache=cache), most_at_once=1)
    config = searcher.suggest("trial")
    assert isinstance(config, dict)
    assert config["request"]["cache"] == str(cache.folder)
    assert len(cloudpickle.dumps((CandidateTrial, config))) < 20_000
    assert len(cloudpickle.dumps(searcher)) < 2_000, "Tune writes its searcher out now and then"
