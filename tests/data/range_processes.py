"""Processes for the range server's tests: `server ADDRESS LIMIT` and `clients ADDRESS CACHE COUNT`.

Each prints a line once it is up and goes on until it is killed; `clients` forks COUNT processes, prints their process
ids and kills them, in mid-use, when its input ends.
"""

import os
import signal
import sys
from pathlib import Path

from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.range_server import RangeServer
from tinyllm_ray.data.served_ranges import ServedRanges


def memory_in_use(name: str) -> set[int]:
    """Inodes of the anonymous files of that name which any process maps or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found |= {int(line.split()[4]) for line in (process / "maps").read_text().splitlines() if name in line}
            for descriptor in os.listdir(process / "fd"):
                path = process / "fd" / descriptor
                if name in os.readlink(path):
                    found.add(path.stat().st_ino)
        except OSError:  # ended since, or another user's
            continue
    return found


def serve(address: str, limit: str) -> None:
    RangeServer(address, int(limit))
    print("up", flush=True)
    sys.stdin.read()


def clients(address: str, folder: str, count: str) -> None:
    cache, children = open_cache(folder), []
    reading, writing = os.pipe()
    for number in range(int(count)):
        child = os.fork()
        if not child:
            source = ServedRanges(cache, address)
            start = number % 10 * 100
            lent = [source.load("train", begin, begin + 100) for begin in (start, (start + 100) % 1000)]
            assert not source._complaint
            os.write(writing, b"%08d" % os.getpid())
            signal.pause()
            raise AssertionError(lent)
        children.append(child)
    for _ in children:
        assert os.read(reading, 8)
    print(*children, flush=True)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    {"server": serve, "clients": clients}[sys.argv[1]](*sys.argv[2:])
