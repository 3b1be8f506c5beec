"""Between Tune, which asks what to run next, and the driver, which decides: one candidate a device at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ray.tune.search import Searcher

from tinyllm_ray.cluster.places import ELSEWHERE, Placing
from tinyllm_ray.cluster.surplus import Surplus


class Driver(Protocol):
    """Decides what is measured; its methods are called from Tune's loop, one at a time."""

    def ask(self) -> Mapping[str, Any] | None:
        """The next TrialRequest, or None when there is none now.

        Its `place`, where it has one, is the place it has to run in: one that came with a record.
        """

    @property
    def finished(self) -> bool:
        """Whether `ask` will never give another one."""

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        """One event of a running candidate, `{"event": "record", "record": {...}, "place": ...}` being its last."""

    def lose(self, candidate: str) -> None:
        """A candidate's Ray process or node went away before its record came."""


class CandidateSearcher(Searcher):  # type: ignore[misc]
    """Tune's searcher over a Driver; the names of the methods' arguments are Tune's and fixed."""

    def __init__(
        self, driver: Driver, first: Mapping[str, Any], most_at_once: int, logs: Path, range_servers: str | None
    ) -> None:
        super().__init__()
        self._driver = driver
        self._first: Mapping[str, Any] | None = first
        self._most_at_once = most_at_once
        self._settings = {"logs": str(logs), "range_servers": range_servers}
        self._running: dict[str, Mapping[str, Any]] = {}
        """Requests by trial."""
        self._unheard: set[str] = set()
        """Trials that may still find themselves elsewhere."""
        self._placing = Placing(most_at_once)
        self._recorded = 0
        self.surplus: Surplus | None = None

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if len(self._running) + len(self._placing) >= self._most_at_once:
            return None
        if self._placing.is_searching:
            request = self._placing.next()
            if request is None:
                return None
        else:
            request, self._first = self._first or self._driver.ask(), None
        if request is None:
            self._hand_back()
            return Searcher.FINISHED if self._driver.finished else None
        self._running[trial_id] = request
        self._unheard.add(trial_id)
        if self.surplus is not None:
            self.surplus.started(len(self._running), request.get("purpose", "search"))
        return {"request": dict(request), **self._settings}

    def is_over(self) -> bool:
        """Whether nobody waits for the trials that are left, which hold their devices."""
        return self._driver.finished and not self._running and not self._placing.is_searching and len(self._placing) > 0

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        request, event = self._running.get(trial_id), json.loads(result["event"])
        self._unheard.discard(trial_id)
        if request is None:
            return  # it holds its device
        if event["event"] != ELSEWHERE:
            self._driver.hear(request["candidate"], event)
            return
        del self._running[trial_id]
        if not self._placing.hear(trial_id, request, event["place"]):
            self._driver.lose(request["candidate"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._unheard.discard(trial_id)
        if self._placing.end(trial_id):
            return
        candidate = self._running.pop(trial_id)["candidate"]
        event = json.loads(result["event"]) if result and not error else {"event": None}
        if event["event"] == "record":
            self._recorded += 1
            self._driver.hear(candidate, event)
        else:
            self._driver.lose(candidate)

    def _hand_back(self) -> None:
        """The study has nothing more to start now. While its first candidate runs, that says nothing of the rest.

        Nor does it while a candidate may be looking for its place, which is on one of the idle nodes.
        """
        looking = self._unheard or self._placing.is_searching
        if self.surplus is not None and self._recorded and not looking and not self._driver.finished:
            left = self.surplus.hand_back()
            if left is not None:
                self._most_at_once = self._placing.devices = left

    def lose_the_rest(self) -> None:
        """Tune says nothing of the trials that it gave up with the experiment."""
        for request in self._running.values():
            self._driver.lose(request["candidate"])
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its experiment; the study's own records are what is resumed from, so nothing of it is kept."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """The study's records are what is resumed from."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""
