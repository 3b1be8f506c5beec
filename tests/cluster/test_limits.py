"""A node's limits: raised where that is allowed, else named before Ray hangs in them."""

import resource

import pytest

from tinyllm_ray.cluster.limits import LEAST_FILES, LEAST_PROCESSES, make_room
from tinyllm_ray.errors import ConfigError

PROCESSES, FILES = resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE
MUCH = (1 << 20, 1 << 20)


def after(processes: tuple[int, int], files: tuple[int, int], user: int = 1000) -> dict[int, tuple[int, int]]:
    limits = {PROCESSES: processes, FILES: files}
    make_room(user, get=limits.__getitem__, put=limits.__setitem__)
    return limits


def test_soft_limits_are_raised_as_far_as_needed() -> None:
    assert after((512, 1 << 20), (1024, 1 << 20)) == {
        PROCESSES: (LEAST_PROCESSES, 1 << 20),
        FILES: (LEAST_FILES, 1 << 20),
    }
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert after(unlimited, MUCH) == {PROCESSES: unlimited, FILES: MUCH}


def test_a_hard_limit_that_is_too_low_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^ulimit -u is 512 here, and Ray wants 1024 or more"):
        after((512, 512), MUCH)
    with pytest.raises(ConfigError, match=r"^ulimit -n is 1024 here"):
        after(MUCH, (1024, 1024))


def test_roots_processes_are_not_counted() -> None:
    assert after((512, 512), MUCH, user=0)[PROCESSES] == (512, 512)


def test_this_machine_has_room() -> None:
    make_room()
