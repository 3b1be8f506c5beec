"""A candidate that cannot win, from its process's events to its record."""

import time
from collections.abc import Callable
from typing import Any

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate
from tinyllm_ray.train.outcome import RunningCandidate, build_record, judge
from tinyllm_ray.train.trial import run_trial
from tinyllm_ray.train.trial_request import TrialRequest

MakeConfig = Callable[..., Config]

SHORT = Protocol(version="adaptive", data_mode="synthetic", warmup_updates=4, window_seconds=0.02)


def told(config: Config, beat: float | None, protocol: Protocol = SHORT) -> RunningCandidate:
    """What the launcher has heard once the candidate's process has ended, the request having gone through JSON."""
    request = TrialRequest(
        study="s",
        candidate="c001",
        label="l",
        config=config.model_dump(mode="json"),
        protocol=protocol,
        cache=None,
        cache_identity=None,
        limit_seconds=60,
        bar={"targets_per_second": beat},
    ).model_dump(mode="json")
    candidate = RunningCandidate(request, Deadline.after(60), 0.0, 0.0)
    run_trial(TrialRequest.model_validate(request), candidate.hear, time.perf_counter())
    return candidate


def record(candidate: RunningCandidate) -> Any:
    fate, reason = judge(candidate, {"event": "ended", "status": 0})
    return build_record(candidate, fate, reason, 1.0, {}, {"sha256": "x", "dirty": None}, None)


def test_one_that_cannot_win_is_dominated_and_keeps_what_was_seen(tiny: MakeConfig) -> None:
    found = record(told(tiny(), beat=1e12))
    assert found.fate is Fate.DOMINATED
    assert "targets/s after 1 window, 1,000,000,000,000 are to beat" in found.reason
    assert len(found.windows) == 1
    assert found.targets_per_second == found.windows[0].targets_per_second
    assert found.protocol.version == "adaptive"


def test_one_that_may_win_is_complete(tiny: MakeConfig) -> None:
    for beat in (None, 1.0):
        found = record(told(tiny(), beat))
        assert (found.fate, found.reason) == (Fate.COMPLETE, None)
        assert len(found.windows) >= 3
        assert all(window.gpu is None for window in found.windows) or found.devices[0].kind == "cuda"


def test_the_protocol_by_count_stops_nobody(tiny: MakeConfig) -> None:
    by_count = Protocol(data_mode="synthetic", warmup_updates=2, windows=2, updates_per_window=2)
    assert record(told(tiny(), 1e12, by_count)).fate is Fate.COMPLETE


def test_wrong_numbers_weigh_more_than_a_low_speed(tiny: MakeConfig) -> None:
    candidate = told(tiny(), beat=1e12)
    candidate.windows = [candidate.windows[0].model_copy(update={"loss": None})]
    assert record(candidate).fate is Fate.INVALID
