"""A node's range server: reads each range that is asked for once, and lends its memory to every process that asks.

A range lies in an anonymous file in memory (memfd_create, sealed against writing) whose descriptor goes to the client
over a Unix socket (SCM_RIGHTS), which maps it. Nothing of it has a name in /dev/shm, and the kernel frees it with its
last holder, so that neither a killed client nor a killed server leaves any memory behind. The socket's name is in
Linux's abstract namespace and vanishes with its process as well; as names there have no permissions, both sides check
that the other belongs to the same user.

What the server holds is bounded by `limit_bytes`: before a range is read, those least recently asked for are let go of.
A client's mapping of one that was let go keeps it alive beyond the limit, at most the ranges that the clients' own
read-ahead holds: `prefetch_depth` + 1 a client, as if each had read them itself.

Messages are JSON in the packets of a SOCK_SEQPACKET socket: the client's `{cache, identity, split, start, stop}`, the
server's `{"reading": true}` every second while a read goes on, then `{"range": true}` with the descriptor, or
`{"error": TEXT}`. Standard library and numpy; no Ray.
"""

import hashlib
import json
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.range_store import RangeMemory, RangeStore

log = logging.getLogger(__name__)

MESSAGE_BYTES: Final = 2**16
LIMIT_BYTES: Final = 2 * 2**30
"""Sixteen ranges of the reference cache (128 MiB each); a machine with less than 16 GiB gives an eighth of it."""

_STILL_READING_SECONDS = 1.0
_BACKLOG = 128


def supported() -> bool:
    """Whether this system has what server and clients need: Linux does, macOS does not."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def server_address(servers: str, node: str) -> str:
    """The address of a node's server among `servers`, for all who know the two; `@` is Linux's sign for its kind."""
    digest = hashlib.sha256(f"{servers}\0{node}".encode()).hexdigest()[:20]
    return f"@tinyllm_ray-{os.getuid()}-{digest}"


def socket_name(address: str) -> str:
    """An address as the kernel takes it."""
    assert address.startswith("@")
    return "\0" + address[1:]


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def default_limit() -> int:
    """The most that a server holds on this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(LIMIT_BYTES, memory // 8)


class RangeServer:
    """Serves ranges at `address` in threads of its own from its making until `close` or the process's end.

    Raises OSError where the address is taken.
    """

    def __init__(
        self,
        address: str,
        limit_bytes: int | None = None,
        open_cache: Callable[[Path], TokenCache] = open_cache,
    ) -> None:
        self.store = RangeStore(default_limit() if limit_bytes is None else limit_bytes)
        self._open_cache = open_cache
        self._caches: dict[tuple[str, str], TokenCache] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(socket_name(address))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._accepting = threading.Thread(target=self._accept, name="range-server", daemon=True)
        self._accepting.start()

    @property
    def clients(self) -> int:
        """Connections that are open."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """End every connection and let go of every range; what clients mapped stays theirs. Waits for no read."""
        _shut(self._listener)
        self._listener.close()
        self._accepting.join()  # until then the address is taken
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)
        self.store.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="range-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if same_user(connection):
                while message := connection.recv(MESSAGE_BYTES):
                    self._answer(connection, json.loads(message))
        except OSError:  # the client went away; its mappings end with it
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        try:
            future = self._range(**asked)
        except Exception as error:  # the client decides what becomes of it, and reads the files itself
            log.warning("%s", error)
            _send(connection, {"error": str(error)})
            return
        while not _wait(future, _STILL_READING_SECONDS):
            _send(connection, {"reading": True})
        found = future.result()
        if isinstance(found, str):
            _send(connection, {"error": found})
        else:
            socket.send_fds(connection, [json.dumps({"range": True}).encode()], [found.descriptor])

    def _range(self, cache: str, identity: str, split: str, start: int, stop: int) -> "Future[RangeMemory | str]":
        opened = self._cache(cache, identity)
        size = (stop - start) * opened.dtype.itemsize
        return self.store.get(
            (cache, identity, split, start, stop),
            size,
            lambda memory: opened.read_into(split, start, memory.view(opened.dtype)),
        )

    def _cache(self, folder: str, identity: str) -> TokenCache:
        with self._lock:
            known = self._caches.get((folder, identity))
        if known is not None:
            return known
        opened = self._open_cache(Path(folder))
        if opened.identity != identity:
            raise ValueError(f"{folder}: holds the cache {opened.identity[:12]}, not {identity[:12]}")
        with self._lock:
            self._caches[folder, identity] = opened
        return opened


def _wait(future: "Future[Any]", seconds: float) -> bool:
    try:
        future.result(seconds)
    except TimeoutError:
        return False
    return True


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.send(json.dumps(message).encode())


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        return
