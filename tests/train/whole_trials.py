"""A candidate from its request to its record, in this process: what the launcher and the starter do around it."""

import time

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.train.outcome import RunningCandidate, build_record, judge
from tinyllm_ray.train.trial import run_trial
from tinyllm_ray.train.trial_request import TrialRequest


def measured(config: Config, cache: TokenCache, protocol: Protocol, parity: bool = False) -> TrialRecord:
    request = TrialRequest(
        study="s",
        candidate="c01",
        label="l",
        config=config.model_dump(mode="json"),
        protocol=protocol,
        cache=str(cache.folder),
        cache_identity=cache.identity,
        limit_seconds=600,
        parity=parity,
    )
    candidate = RunningCandidate(request.model_dump(mode="json"), Deadline.after(600), 0.0, 0.0)
    run_trial(request, candidate.hear, time.perf_counter())
    fate, reason = judge(candidate, {"event": "ended", "status": 0})
    return build_record(candidate, fate, reason, 1.0, {}, {"sha256": "s", "dirty": None}, None)
