"""The limits that a node's Ray needs room under: processes and threads, open files.

Standard library only: a node's step imports this module.
"""

import os
import resource
from collections.abc import Callable

from tinyllm_ray.errors import ConfigError

LEAST_PROCESSES = 1024
"""Threads count: Ray 2.60's own processes on a head have 390 on two cores, a prefetch actor, a trial's actor and the
driver 25 to 30 each; a compiler's processes come on top."""
LEAST_FILES = 4096

_Limits = tuple[int, int]
_NAMES = {resource.RLIMIT_NPROC: ("ulimit -u", LEAST_PROCESSES), resource.RLIMIT_NOFILE: ("ulimit -n", LEAST_FILES)}


def make_room(
    user: int | None = None,
    get: Callable[[int], _Limits] = resource.getrlimit,
    put: Callable[[int, _Limits], None] = resource.setrlimit,
) -> None:
    """Raise this process's soft limits, and so its children's. Raises ConfigError where the hard ones are too low."""
    for kind, (name, least) in _NAMES.items():
        soft, hard = get(kind)
        if kind == resource.RLIMIT_NPROC and (os.geteuid() if user is None else user) == 0:
            continue  # root's processes are not counted (setrlimit(2))
        if _at_least(soft, least):
            continue
        if not _at_least(hard, least):
            raise ConfigError(f"{name} is {hard} here, and Ray wants {least} or more; have the node's limit raised")
        put(kind, (least, hard))


def _at_least(value: int, least: int) -> bool:
    return value == resource.RLIM_INFINITY or value >= least
