"""Where a cluster's processes listen: the address other nodes reach, and ports that belong to one job.

Standard library only: it runs before anything slow is imported.
"""

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Iterator

from tinyllm_ray.errors import ConfigError, TinyllmRayError

FIRST_PORT = 10_000
PORTS_A_JOB = 4
_BLOCKS = 5_000
"""Up to port 30,000: from 32,768 on Linux hands ports out by itself (ip_local_port_range)."""
_MOST_BLOCKS_TRIED = 50
REACH_SECONDS = 20.0
"""For the head to answer a node, which in one network takes milliseconds; Ray 2.60 tried for 260 s without a word."""
_PAUSE_SECONDS = 1.0

_SIOCGIFADDR = 0x8915


def port_blocks(job: int) -> Iterator[tuple[int, ...]]:
    """Blocks of ports to try for a job, its own first; jobs whose numbers are near have blocks apart."""
    for attempt in range(_MOST_BLOCKS_TRIED):
        first = FIRST_PORT + PORTS_A_JOB * ((job + 97 * attempt) % _BLOCKS)
        yield tuple(range(first, first + PORTS_A_JOB))


def is_free(port: int) -> bool:
    """Whether nothing listens on `port` at any of this host's addresses."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                # What ended a moment ago (TIME_WAIT) is in nobody's way; a listener still is.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError:
            if family == socket.AF_INET6 and not _has_ipv6():
                continue
            return False
    return True


def free_ports(job: int, free: Callable[[int], bool] = is_free) -> tuple[int, ...]:
    """The first block of a job that is wholly free. Raises ConfigError naming the ports where none is."""
    tried: list[int] = []
    for block in port_blocks(job):
        busy = [port for port in block if not free(port)]
        if not busy:
            return block
        tried += busy
    raise ConfigError(f"no {PORTS_A_JOB} free ports for job {job} on {socket.gethostname()}; in use: {tried}")


def own_address(name: str, interface: str | None) -> str:
    """This host's IPv4 address: of `interface`, else the first one that `name` resolves to and that is here.

    Where the name leads to no address of this host but a loopback one, the address that the default route goes out by.
    Raises ConfigError naming the interface that has none.
    """
    if interface is not None:
        return _interface_address(interface)
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        found = []
    for address in found:
        if isinstance(address, str) and not address.startswith("127.") and _is_here(address):
            return address
    return address_towards("192.0.2.1") or "127.0.0.1"


def address_towards(target: str) -> str | None:
    """This host's address on the way to `target`; None where no route leads there. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def require_answer(
    head: str,
    address: str,
    seconds: float = REACH_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once `head` (HOST:PORT) has answered this host's `address`, so that both ways are open.

    Raises TinyllmRayError naming both ends and the interface where it does not within `seconds`.
    """
    host, _, port = head.rpartition(":")
    end = clock() + seconds
    while True:
        try:
            left = max(end - clock(), _PAUSE_SECONDS)
            with socket.create_connection((host, int(port)), timeout=left, source_address=(address, 0)):
                return
        except OSError as error:
            if clock() + _PAUSE_SECONDS >= end:
                raise TinyllmRayError(
                    f"the head at {head} does not answer {address} ({interface_of(address)}) within {seconds:.0f} s: "
                    f"{error.strerror or error}; name the network that nodes share as the site's interface"
                ) from None
        sleep(_PAUSE_SECONDS)


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address, in words where none has."""
    for _, name in socket.if_nameindex():
        try:
            if _interface_address(name) == address:
                return name
        except ConfigError:
            continue
    return "no interface's own address"


def _interface_address(interface: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"interface {interface!r} has no IPv4 address on {socket.gethostname()}; its interfaces are {known}"
        ) from None


def _is_here(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
