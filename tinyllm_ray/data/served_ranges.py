"""Ranges asked of the node's range server, and read from the cache's files wherever that does not work out.

No server, one that dies, stays silent or reports an error costs a read and a log line: the files are read instead, and
what is wrong with them is raised from there, with its cause.
"""

import json
import logging
import mmap
import os
import socket
from typing import Any

import numpy as np

from tinyllm_ray.data.cache import TokenCache, Tokens
from tinyllm_ray.data.range_server import MESSAGE_BYTES, same_user, socket_name, supported
from tinyllm_ray.data.ranges import FileRanges, RangeSource

log = logging.getLogger(__name__)

SILENCE_SECONDS = 10.0
"""A server that reads says so every second; one silent for this long hangs, and is not asked again."""


def open_ranges(cache: TokenCache, address: str | None) -> RangeSource:
    """The range server's ranges where an address is given and this system has such servers, else the files'."""
    return ServedRanges(cache, address) if address and supported() else FileRanges(cache)


class ServedRanges:
    """Ranges in memory that all processes of the node share, mapped read-only and without a copy."""

    def __init__(self, cache: TokenCache, address: str, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._cache = cache
        self._address: str | None = address
        self._silence_seconds = silence_seconds
        self._files = FileRanges(cache)
        self._connection: socket.socket | None = None
        self._complaint = ""

    def load(self, split: str, start: int, stop: int) -> Tokens:
        if self._address is None:
            return self._files.load(split, start, stop)
        try:
            tokens = self._ask(self._address, split, start, stop)
        except (OSError, ValueError) as error:
            self._give_up(error)
            return self._files.load(split, start, stop)
        self._complaint = ""
        return tokens

    def release(self, tokens: Tokens) -> None:
        self._files.release(tokens)  # a mapping ends with its last reference

    def close(self) -> None:
        self._disconnect()
        self._files.close()

    def _ask(self, address: str, split: str, start: int, stop: int) -> Tokens:
        connection = self._connection or self._connect(address)
        asked = {
            "cache": str(self._cache.folder.absolute()),
            "identity": self._cache.identity,
            "split": split,
            "start": start,
            "stop": stop,
        }
        connection.send(json.dumps(asked).encode())
        reply, descriptors = _receive(connection)
        while "reading" in reply:
            reply, descriptors = _receive(connection)
        try:
            if "error" in reply:
                raise ValueError(reply["error"])
            return _map(descriptors[0], stop - start, self._cache.dtype)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _connect(self, address: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = connection
        connection.settimeout(self._silence_seconds)
        connection.connect(socket_name(address))
        if not same_user(connection):
            raise ConnectionError("another user's process listens at its address")
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _give_up(self, error: OSError | ValueError) -> None:
        """The next range is asked for anew, as the server may be back by then, but not of one that hangs."""
        reason = str(error)
        if isinstance(error, TimeoutError):
            reason = f"silent for {self._silence_seconds:.0f} s; it is not asked again"
            self._address = None
        if reason != self._complaint:
            log.warning("range server: %s; reading from the files of %s", reason, self._cache.folder)
        self._complaint = reason
        if isinstance(error, OSError):  # after an error of its own the server still answers
            self._disconnect()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not message:
        raise ConnectionError("it went away")
    reply: dict[str, Any] = json.loads(message)
    return reply, descriptors


def _map(descriptor: int, count: int, dtype: np.dtype[Any]) -> Tokens:
    # Private, as kernels before 6.7 refuse shared mappings of memory sealed against writing; read-only pages of a
    # private mapping are the file's own.
    memory = mmap.mmap(descriptor, count * dtype.itemsize, mmap.MAP_PRIVATE, mmap.PROT_READ)
    tokens: Tokens = np.frombuffer(memory, dtype)
    # Touches each page, so that the page faults happen in the reader's thread, without the interpreter's lock.
    tokens[:: mmap.PAGESIZE // dtype.itemsize].max()
    return tokens
