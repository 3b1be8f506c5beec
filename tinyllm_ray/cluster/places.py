"""Places, which are where a trial's device is, and how a candidate comes to the one it has to run in.

Ray cannot be asked for one GPU of several, and Tune gives a trial whatever process is free. So a trial that finds
itself elsewhere holds its device, which leaves fewer to choose from, while its candidate is tried as another trial;
after a while its process goes and gives the device back. Trials one after the other stay in one process, so this
happens once a verification, and whenever a process is lost.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.tune import Stopper

from tinyllm_ray.clock import Clock

ELSEWHERE = "elsewhere"
"""The event of a trial whose place is not the one that was asked for."""

HOLD_SECONDS = 60.0
"""Longer than all other processes take to start, so that no place is looked at twice: 4 to 8 s each."""

_STEP_SECONDS = 0.5


def this_place() -> str:
    """The node and the GPUs that Ray has given this actor; known before any of its processes touches a device."""
    context = ray.get_runtime_context()
    return "/".join([context.get_node_id(), *context.get_accelerator_ids().get("GPU", [])])


def is_there(place: str) -> bool:
    """Whether the place's node is alive."""
    node = place.partition("/")[0]
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


class Hold:
    """A trial that holds its device, as its candidate has to run in another place."""

    def __init__(self, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._until = clock() + HOLD_SECONDS

    def step(self) -> dict[str, Any]:
        """The trial's event. Raises RuntimeError once it is to end, so that Tune does not use its process again."""
        if self._clock() >= self._until:
            raise RuntimeError("this device was not the one asked for, and has been held for long enough")
        self._sleep(_STEP_SECONDS)
        return {"event": ELSEWHERE}


class Placing:
    """Which trials hold a device, and which candidate is still to find its place; part of a searcher."""

    def __init__(self, devices: int, is_there: Callable[[str], bool] = is_there) -> None:
        self.devices = devices
        self._is_there = is_there
        self._holding: dict[str, str] = {}
        """The place that each trial holds."""
        self._request: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """Devices that are held."""
        return len(self._holding)

    @property
    def is_searching(self) -> bool:
        """Whether a candidate is to be tried as another trial."""
        return self._request is not None

    def next(self) -> Mapping[str, Any] | None:
        """The request that is to be tried as another trial now, if there is one; not while its own place is held."""
        if self._request is None or self._request["place"] in self._holding.values():
            return None
        request, self._request = self._request, None
        return request

    def hear(self, trial_id: str, request: Mapping[str, Any], place: str) -> bool:
        """A trial says that it is elsewhere, in `place`; whether its candidate is going to be tried as another one."""
        self._holding[trial_id] = place
        wanted = request["place"]
        all_seen = len(self._holding) >= self.devices and wanted not in self._holding.values()
        if all_seen or not self._is_there(wanted):
            return False
        self._request = request
        return True

    def end(self, trial_id: str) -> bool:
        """A trial has ended; whether it was one that held."""
        return self._holding.pop(trial_id, None) is not None


class Over(Stopper):  # type: ignore[misc]
    """Ends Tune's loop with the study, whoever still holds a device."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def __call__(self, trial_id: str, result: Mapping[str, object]) -> bool:
        """No single trial is stopped."""
        return False

    def stop_all(self) -> bool:
        return self._is_over()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its experiment, and nothing is ever resumed from that."""
        return {}
