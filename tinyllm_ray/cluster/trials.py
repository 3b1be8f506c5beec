"""The Ray Tune adapter: a study's candidates as Tune trials, in processes that are reused from trial to trial.

One Tune trial is one candidate; one Tune result is one event of the candidate's process. The actor behind a trial holds
the device and a `Launcher`, and never touches CUDA itself.
"""

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.connect import MODEL_PREFIX, Connection
from tinyllm_ray.cluster.metrics import export_gpu
from tinyllm_ray.cluster.names import show_process_as, trial_name
from tinyllm_ray.cluster.numa import Seat, trial_gpu
from tinyllm_ray.cluster.places import Hold, Over, this_place
from tinyllm_ray.cluster.prefetch import address_on_this_node
from tinyllm_ray.cluster.room import Room
from tinyllm_ray.cluster.searcher import CandidateSearcher, Driver
from tinyllm_ray.cluster.surplus import Surplus
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.records import Fate
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher
from tinyllm_ray.train.outcome import RunningCandidate, build_record

_SHARE_OF_MODEL = 0.001
"""Of the resource that names a node's model of GPU, as Ray itself asks for it; a node has 1 of it."""

_FORCED_CLEANUP_SECONDS = "2"
"""How long Tune waits for an actor that does not stop; the default waits for ever."""


_NEVER_SECONDS = "1000000000"
"""Between two snapshots of Tune's own state, which nobody reads; a full disk would end the study at the next one."""


def run_trials(
    driver: Driver,
    connection: Connection,
    logs: Path,
    storage: Path,
    range_servers: str | None = None,
    callbacks: Sequence[tune.Callback] = (),
) -> str | None:
    """Run candidates until `driver` is finished, or until nothing is left that could; then says so, else None.

    Every trial asks Ray for the same: a GPU and its share of the node's cores, or a node's cores where no GPU is.
    `logs` gets a file a candidate, `storage` what Tune keeps for itself; `range_servers` names the
    servers that candidates ask for tokens (`prefetching`), None where there are none; `callbacks` are Tune's
    (`callbacks.guarded`). Raises ConfigError where no node has what a trial takes.
    """
    os.environ.update(
        TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1",
        TUNE_FORCE_TRIAL_CLEANUP_S=_FORCED_CLEANUP_SECONDS,
        TUNE_DISABLE_SIGINT_HANDLER="1",
        RAY_AIR_NEW_OUTPUT="0",
        TUNE_GLOBAL_CHECKPOINT_S=_NEVER_SECONDS,
        # Or one process would be started after the other, 4 to 8 s each.
        TUNE_MAX_PENDING_TRIALS_PG=str(concurrency(connection)),
    )
    room = Room(resources(connection))
    first = driver.ask()
    if first is None:
        return None  # a study that is resumed after its end
    searcher = CandidateSearcher(
        driver, first, most_at_once=concurrency(connection), logs=logs, range_servers=range_servers
    )
    searcher.surplus = Surplus(resources(connection), ray.util.get_node_ip_address())
    try:
        _build_tuner(searcher, room, connection, storage, callbacks).fit()
    except OSError as error:  # Tune keeps files of its own on this node
        room.reason = f"Ray Tune cannot go on: {error}"
    searcher.lose_the_rest()
    return room.reason


def _build_tuner(
    searcher: CandidateSearcher,
    room: Room,
    connection: Connection,
    storage: Path,
    callbacks: Sequence[tune.Callback],
) -> tune.Tuner:
    return tune.Tuner(
        tune.with_resources(CandidateTrial, resources(connection)),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=lambda trial: _name(trial.config["request"]),
            trial_dirname_creator=lambda trial: trial.config["request"]["candidate"],
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(storage),
            verbose=0,
            stop=[room, Over(searcher.is_over)],
            callbacks=list(callbacks),
            # A trial has nothing to keep, and its node need not see the driver's storage.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


def concurrency(connection: Connection) -> int:
    """Candidates that run at the same time: one a GPU, one a node where there are none."""
    return connection.gpus or connection.nodes


def resources(connection: Connection) -> dict[str, float]:
    """What every trial asks Ray for."""
    if not connection.gpus:
        return {"CPU": connection.cores_per_node}
    gpus_per_node = -(-connection.gpus // connection.nodes)
    asked: dict[str, float] = {"GPU": 1, "CPU": max(1, connection.cores_per_node // gpus_per_node)}
    if connection.only is not None:
        asked[MODEL_PREFIX + connection.only] = _SHARE_OF_MODEL
    return asked


class CandidateTrial(tune.Trainable):  # type: ignore[misc]
    """Runs candidates for Tune; `config` holds `request` (a TrialRequest), `logs` and `range_servers`."""

    def setup(self, config: dict[str, Any]) -> None:
        self._launcher: Launcher | None = None
        self._fault: dict[str, Any] | None = None
        self._gpu = export_gpu()
        self._hold: Hold | None = None
        self._place = this_place()
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        if self._launcher is not None:
            self._launcher.abandon()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        event = self._hold.step() if self._hold else self._fault
        if event is None:
            assert self._launcher is not None
            show_process_as(self._name)
            event = self._launcher.step()
            if event["event"] == "record" and self._seat.placement.gpu:
                event["record"]["environment"]["placement"] = self._seat.as_json()
        # As text: Tune flattens nested results on their way to the searcher.
        return {"event": json.dumps({**event, "place": self._place}), "done": event["event"] == "record"}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """A candidate is measured again, never continued."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """See `save_checkpoint`."""

    def cleanup(self) -> None:
        if self._launcher is not None:
            self._launcher.close()

    def _begin(self, config: Mapping[str, Any]) -> None:
        """Start the candidate; what this node cannot do becomes its record, since Tune passes on no reason."""
        wanted = config["request"].get("place")
        self._hold = Hold() if wanted not in (None, self._place) else None
        self._fault = None
        if self._hold:
            return
        self._name = _name(config["request"])
        if self._gpu is not None:
            self._gpu.candidate = self._name
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


def _name(request: Mapping[str, Any]) -> str:
    return trial_name(request["config"]["model"], request["label"])


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
