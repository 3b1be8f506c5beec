"""The Ray Tune adapter: a study's candidates as Tune trials, in processes that are reused from trial to trial.

One Tune trial is one candidate; one Tune result is one event of the candidate's process. The actor behind a trial holds
the device and a `Launcher`, and never touches CUDA itself.
"""

import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import tune
from ray.tune.search import Searcher

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.connect import Connection
from tinyllm_ray.cluster.numa import Seat, trial_gpu
from tinyllm_ray.cluster.prefetch import address_on_this_node
from tinyllm_ray.cluster.room import Room
from tinyllm_ray.cluster.surplus import Surplus
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.records import Fate
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher
from tinyllm_ray.train.outcome import RunningCandidate, build_record

_FORCED_CLEANUP_SECONDS = "2"
"""How long Tune waits for an actor that does not stop; the default waits for ever."""


_NEVER_SECONDS = "1000000000"
"""Between two snapshots of Tune's own state, which nobody reads; a full disk would end the study at the next one."""


class Driver(Protocol):
    """Decides what is measured; its methods are called from Tune's loop, one at a time."""

    def ask(self) -> Mapping[str, Any] | None:
        """The next TrialRequest, or None when there is none now."""

    @property
    def finished(self) -> bool:
        """Whether `ask` will never give another one."""

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        """One event of a running candidate, `{"event": "record", "record": {...}}` being its last."""

    def lose(self, candidate: str) -> None:
        """A candidate's Ray process or node went away before its record came."""


def run_trials(
    driver: Driver, connection: Connection, logs: Path, storage: Path, range_servers: str | None = None
) -> str | None:
    """Run candidates until `driver` is finished, or until nothing is left that could; then says so, else None.

    Every trial asks Ray for the same: a GPU and its share of the node's cores, or a node's cores where no GPU is.
    `logs` gets a file a candidate, `storage` what Tune keeps for itself; `range_servers` names the
    servers that candidates ask for tokens (`prefetching`), None where there are none. Raises ConfigError where no node
    has what a trial takes.
    """
    os.environ.update(
        TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1",
        TUNE_FORCE_TRIAL_CLEANUP_S=_FORCED_CLEANUP_SECONDS,
        TUNE_DISABLE_SIGINT_HANDLER="1",
        RAY_AIR_NEW_OUTPUT="0",
        TUNE_GLOBAL_CHECKPOINT_S=_NEVER_SECONDS,
    )
    room = Room(resources(connection))
    first = driver.ask()
    if first is None:
        return None  # a study that is resumed after its end
    searcher = _Searcher(driver, first, most_at_once=concurrency(connection), logs=logs, range_servers=range_servers)
    searcher.surplus = Surplus(resources(connection), ray.util.get_node_ip_address())
    tuner = tune.Tuner(
        tune.with_resources(CandidateTrial, resources(connection)),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: trial.config["request"]["candidate"],
            trial_dirname_creator=lambda trial: trial.config["request"]["candidate"],
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(storage),
            verbose=0,
            stop=room,
            # A trial has nothing to keep, and its node need not see the driver's storage.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    try:
        tuner.fit()
    except OSError as error:  # Tune keeps files of its own on this node
        room.reason = f"Ray Tune cannot go on: {error}"
    searcher.lose_the_rest()
    return room.reason


def concurrency(connection: Connection) -> int:
    """Candidates that run at the same time: one a GPU, one a node where there are none."""
    return connection.gpus or connection.nodes


def resources(connection: Connection) -> dict[str, float]:
    """What every trial asks Ray for."""
    if not connection.gpus:
        return {"CPU": connection.cores_per_node}
    gpus_per_node = -(-connection.gpus // connection.nodes)
    return {"GPU": 1, "CPU": max(1, connection.cores_per_node // gpus_per_node)}


class CandidateTrial(tune.Trainable):  # type: ignore[misc]
    """Runs candidates for Tune; `config` holds `request` (a TrialRequest), `logs` and `range_servers`."""

    def setup(self, config: dict[str, Any]) -> None:
        self._launcher: Launcher | None = None
        self._fault: dict[str, Any] | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        if self._launcher is not None:
            self._launcher.abandon()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        event = self._fault
        if event is None:
            assert self._launcher is not None
            event = self._launcher.step()
            if event["event"] == "record" and self._seat.placement.gpu:
                event["record"]["environment"]["placement"] = self._seat.as_json()
        # As text: Tune flattens nested results on their way to the searcher.
        return {"event": json.dumps(event), "done": event["event"] == "record"}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """A candidate is measured again, never continued."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """See `save_checkpoint`."""

    def cleanup(self) -> None:
        if self._launcher is not None:
            self._launcher.close()

    def _begin(self, config: Mapping[str, Any]) -> None:
        """Start the candidate; what this node cannot do becomes its record, since Tune passes on no reason."""
        self._fault = None
        try:
            if self._launcher is None:
                cores = self.trial_resources.required_resources.get("CPU", 1)
                self._seat = Seat(int(cores), trial_gpu())  # first, as the launcher's processes inherit it
                self._launcher = _build_launcher(Path(config["logs"]))
            self._seat.look_around()
            servers = config["range_servers"]
            address = address_on_this_node(servers) if servers else None
            self._launcher.begin({**config["request"], "range_server": address})
        except Exception as error:
            traceback.print_exc()
            self._fault = _failed(config["request"], f"{type(error).__name__}: {error}")


def _build_launcher(logs: Path) -> Launcher:
    source = source_identity()
    return Launcher(
        logs=logs,
        compile_cache=compile_cache_folder(),
        environment=collect_environment,
        source={"sha256": source.sha256, "dirty": source.dirty},
    )


def _failed(request: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The last event of a candidate that could not be started."""
    source = source_identity()
    candidate = RunningCandidate(request, Deadline.after(0), 0.0, time.time())
    identity = {"sha256": source.sha256, "dirty": source.dirty}
    record = build_record(candidate, Fate.FAILED, reason, 0.0, collect_environment(), identity, None)
    return {"event": "record", "record": record.model_dump(mode="json")}


class _Searcher(Searcher):  # type: ignore[misc]
    """Tune's searcher over a Driver; the names of the methods' arguments are Tune's and fixed."""

    def __init__(
        self, driver: Driver, first: Mapping[str, Any], most_at_once: int, logs: Path, range_servers: str | None
    ) -> None:
        super().__init__()
        self._driver = driver
        self._first: Mapping[str, Any] | None = first
        self._most_at_once = most_at_once
        self._settings = {"logs": str(logs), "range_servers": range_servers}
        self._running: dict[str, str] = {}
        self._recorded = 0
        self.surplus: Surplus | None = None

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if len(self._running) >= self._most_at_once:
            return None
        request, self._first = self._first or self._driver.ask(), None
        if request is None:
            self._hand_back()
            return Searcher.FINISHED if self._driver.finished else None
        self._running[trial_id] = request["candidate"]
        if self.surplus is not None:
            self.surplus.started(len(self._running), request.get("purpose", "search"))
        return {"request": dict(request), **self._settings}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self._driver.hear(self._running[trial_id], json.loads(result["event"]))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        candidate = self._running.pop(trial_id)
        event = json.loads(result["event"]) if result and not error else {"event": None}
        if event["event"] == "record":
            self._recorded += 1
            self._driver.hear(candidate, event)
        else:
            self._driver.lose(candidate)

    def _hand_back(self) -> None:
        """The study has nothing more to start now. While its first candidate runs, that says nothing of the rest."""
        if self.surplus is not None and self._recorded and not self._driver.finished:
            left = self.surplus.hand_back()
            self._most_at_once = self._most_at_once if left is None else left

    def lose_the_rest(self) -> None:
        """Tune says nothing of the trials that it gave up with the experiment."""
        for candidate in self._running.values():
            self._driver.lose(candidate)
        self._running.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its experiment; the study's own records are what is resumed from, so nothing of it is kept."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """The study's records are what is resumed from."""

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""
