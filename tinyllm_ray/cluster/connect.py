"""A connection to Ray: joins the cluster it is pointed at, else starts a local one and ends it again."""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import usable_cores

_OBJECT_STORE_BYTES = 128 * 2**20
"""Batches never travel through the object store; Ray's own default takes 30% of the memory."""

MODEL_PREFIX = "accelerator_type:"
"""Of the resource, 1 a node, by which Ray names a node's model of GPU."""
_KNOCK_SECONDS = 5.0
_LONGEST_FOLDER = 45
_LONGEST_TMPDIR = 75
"""Over sockets of Python's, 32 characters deeper, Ray's dashboard starts its parts; a path of one ends at 107."""


@dataclass(frozen=True)
class Connection:
    """What the cluster offers."""

    address: str
    dashboard: str | None
    """Address of the dashboard's page; None where there is none."""
    started: bool
    """Whether this process started the cluster, and so ends it."""
    nodes: int
    """Nodes that can hold a trial."""
    gpus: int
    cores_per_node: int
    """Cores of the smallest node."""
    accelerators: tuple[str, ...] = ()
    """Models of the GPUs, as Ray names them."""
    only: str | None = None
    """The model to which trials are held; None where any will do."""

    @property
    def device_kind(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"


@contextmanager
def connect(address: str | None, only: str | None = None) -> Iterator[Connection]:
    """Join the cluster at `address` (`auto`, `HOST:PORT`, `ray://...`), or start a local one where it is None.

    `only` is a model of GPU, as Ray names them: what has none of it does not count. Raises ConfigError where no cluster
    answers, or none with such a GPU. A cluster that was joined goes on afterwards.

    >>> from tinyllm_ray.cluster.connect import connect
    >>> with connect(None) as connection:
    ...     print(connection.started, connection.nodes)
    True 1
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # The variable would redirect even a local start.
        os.environ.pop("RAY_ADDRESS", None)
        _start_local(quiet)
    else:
        try:
            _knock(address)
            ray.init(address=address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"no Ray cluster answers at {address!r} ({reason}); start one, or leave out --address and RAY_ADDRESS; "
                "a cluster with token authentication wants RAY_AUTH_MODE=token"
            ) from None
    try:
        yield _describe(address is None, only)
    finally:
        session = ray._private.worker._global_node.get_session_dir_path() if address is None else None
        ray.shutdown()
        if session is not None:
            # Logs of a cluster that is gone, 2 to 3 MB a study.
            shutil.rmtree(session, ignore_errors=True)


def _start_local(quiet: dict[str, Any]) -> None:
    # Ray's own 15 starves a candidate beside whatever else runs, and a training does not run like that.
    os.environ.setdefault("RAY_worker_niceness", "0")
    dashboard = _has_dashboard()
    if dashboard and len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        raise ConfigError(
            f"TMPDIR {tempfile.gettempdir()}: Ray's dashboard cannot have its sockets there; set TMPDIR to a folder of "
            f"{_LONGEST_TMPDIR} characters or fewer, like /tmp"
        )
    try:
        ray.init(
            address="local",
            num_cpus=usable_cores(),
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(_temporary_folder()),
            **quiet,
        )
    except OSError as error:
        # A home folder that cannot be written (Ray keeps its token there), a full disk.
        raise ConfigError(f"Ray does not start: {error}; HOME and TMPDIR have to be folders it can write") from None


def held_to(connection: Connection, model: str) -> Connection:
    """The connection for trials on GPUs of one of its models. Raises ConfigError where the cluster has none by now."""
    return _describe(connection.started, model)


def _describe(started: bool, only: str | None) -> Connection:
    alive = [node for node in ray.nodes() if node["Alive"]]
    if only is not None:
        alive = _of_model(only, alive)
    # A head without GPUs, or a node without cores, holds no trials.
    nodes = [node for node in alive if node["Resources"].get("GPU")] or [
        node for node in alive if node["Resources"].get("CPU")
    ]
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    context = ray.get_runtime_context()
    dashboard = ray._private.worker.get_dashboard_url()
    return Connection(
        address=context.gcs_address,
        dashboard=f"http://{dashboard}" if dashboard else None,
        started=started,
        nodes=len(nodes),
        gpus=int(sum(node["Resources"].get("GPU", 0) for node in nodes)),
        cores_per_node=min((count for count in cores if count), default=1),
        accelerators=_models(nodes),
        only=only,
    )


def _models(nodes: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Of the nodes' GPUs, as Ray's resources name them."""
    names = {name for node in nodes for name in node["Resources"] if name.startswith(MODEL_PREFIX)}
    return tuple(sorted(name.removeprefix(MODEL_PREFIX) for name in names))


def _of_model(model: str, nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = [node for node in nodes if MODEL_PREFIX + model in node["Resources"]]
    if not found:
        known = ", ".join(_models(nodes)) or "no GPU that Ray knows by name"
        raise ConfigError(f"--by-device: the cluster has no {model!r}; it has {known}")
    return found


def _knock(address: str) -> None:
    """Raises OSError or ValueError where nothing listens at HOST:PORT; Ray itself would try for over a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


def _has_dashboard() -> bool:
    """Whether the dashboard's packages are there (`ray[default]`); asked for without them, Ray does not start."""
    try:
        import ray.dashboard.optional_deps  # noqa: F401
    except ImportError:
        return False
    return True


def _temporary_folder() -> Path:
    """Ray's folder for this user: the default one belongs to whoever on the host came first.

    Ray's sockets lie up to 60 characters deeper, and a socket's path ends at 107.
    """
    folder = Path(tempfile.gettempdir()) / f"ray-{os.getuid()}"
    if len(str(folder)) > _LONGEST_FOLDER:
        folder = Path("/tmp") / folder.name
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; set TMPDIR to a short folder of yours")
    return folder
