"""Token caches: `python -m tinyllm_ray.data prepare --out caches/sotu` makes one; `verify` and `info` look at one."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from tinyllm_ray.command import exit_status, say
from tinyllm_ray.data.options import build_parser, request_of
from tinyllm_ray.errors import EXIT_BUG, EXIT_DONE, ConfigError
from tinyllm_ray.measure.environment import usable_cores

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tinyllm_ray.data.write import MapBatches


class Stopped(BaseException):
    """A signal asks the process to end; no `except Exception` may keep it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {"prepare": _prepare, "verify": _verify, "info": _info}
    try:
        with _signals():
            return exit_status(lambda: commands[options.command](options))
    except Stopped as stopped:
        again = "; the same command goes on from here" if options.command == "prepare" else ""
        say(f"stopped by {signal.Signals(stopped.args[0]).name}{again}", sys.stderr)
        return stopped.exit_status


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM end what goes on, once; a second one ends the process at once."""

    def stop(number: int, frame: object) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare(options: argparse.Namespace) -> int:
    from tinyllm_ray.data.prepare import prepare
    from tinyllm_ray.data.progress import reporter

    request = request_of(options)
    # Ray puts a handler of its own in the place of ours.
    with _map(options) as map_batches, _signals(), reporter(f"preparing {options.out}") as report:
        cache, there = prepare(request, options.out, map_batches=map_batches, report=report)
    tokens = ", ".join(f"{totals.tokens:,} {split}" for split, totals in cache.manifest.splits.items())
    said = "holds this cache already" if there else "is done"
    say(f"{options.out} {said}: {tokens} tokens, identity {cache.identity[:16]}")
    return EXIT_DONE


def _map(options: argparse.Namespace) -> "AbstractContextManager[MapBatches]":
    """How batches are tokenized: in processes of this machine, or on a Ray cluster."""
    import functools
    import os

    from tinyllm_ray.data.pool import map_in_processes

    if options.ray or options.address:
        if options.workers:
            raise ConfigError("--workers is for this machine; with --ray the cluster's cores are used: leave it out")
        from tinyllm_ray.cluster.map_batches import ray_map

        return ray_map(options.address or os.environ.get("RAY_ADDRESS") or None)
    return nullcontext(functools.partial(map_in_processes, workers=options.workers or usable_cores()))


def _verify(options: argparse.Namespace) -> int:
    from tinyllm_ray.data.progress import reporter
    from tinyllm_ray.data.verify import verify

    with reporter(f"reading {options.cache}") as report:
        faults = verify(options.cache, options.workers or usable_cores(), report)
    for fault in faults:
        say(str(fault))
    if faults:
        say(f"{options.cache}: {len(faults):,} files are wrong; prepare the cache again, or copy those files again")
        return EXIT_BUG
    say(f"{options.cache}: every file is what the manifest says")
    return EXIT_DONE


def _info(options: argparse.Namespace) -> int:
    from tinyllm_ray.data.cache import open_cache
    from tinyllm_ray.data.describe import describe

    for line in describe(open_cache(options.cache), options.rows):
        say(line)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
