"""One contract for everything that maps a function over batches: in this process, in worker processes, on Ray."""

import functools
import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import time

import pytest

from tinyllm_ray.data.pool import map_in_processes
from tinyllm_ray.errors import ConfigError, TinyllmRayError

WORKERS = 2
MOST_AHEAD = 2 * WORKERS + 1


def shout(batch):
    return [word.upper() for word in batch]


def slow_first(batch):
    if batch == [b"0"]:
        time.sleep(0.3)
    return batch


def fail_at_three(batch):
    if batch == [b"3"]:
        raise ConfigError("three is not allowed")
    return batch


def die(batch):
    os._exit(9)


def die_later(batch):
    time.sleep(0.3)  # meanwhile the next batch fills the pipe
    os._exit(9)


def die_in_a_result(batch):
    """Of the second batch's result the length and one byte are written, with the lock that other workers wait for."""
    if batch != [b"1"]:
        return batch
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    results = frame.f_locals["result_queue"]
    results._wlock.acquire()
    os.write(results._writer.fileno(), struct.pack("!i", 1000) + b"x")
    os._exit(9)


def who(batch):
    return os.getpid()


def batches(count):
    return [[str(number).encode()] for number in range(count)]


@pytest.fixture(scope="module")
def ray_map():
    from tinyllm_ray.cluster.map_batches import ray_map

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyllm_ray.cluster.connect.usable_cores", lambda: WORKERS)
        patch.setattr("tinyllm_ray.cluster.connect._has_dashboard", lambda: False)  # half of Ray's start
        # This file is no package that a worker could import: its functions travel by value.
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with ray_map(None) as mapped:
            yield mapped
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=["builtin", "processes", "ray"])
def map_batches(request):
    if request.param == "ray":
        return request.getfixturevalue("ray_map")
    return map if request.param == "builtin" else functools.partial(map_in_processes, workers=WORKERS)


def test_results_come_in_order(map_batches):
    assert list(map_batches(slow_first, batches(12))) == batches(12)
    assert list(map_batches(shout, [[b"a", b"b"], [], [b"c"]])) == [[b"A", b"B"], [], [b"C"]]
    assert list(map_batches(shout, [])) == []


def test_few_batches_are_taken_ahead(map_batches):
    taken = 0

    def counted():
        nonlocal taken
        for batch in batches(40):
            taken += 1
            yield batch

    ahead = [taken - done for done, _ in enumerate(map_batches(shout, counted()), start=1)]
    assert len(ahead) == 40
    assert max(ahead) <= MOST_AHEAD


def test_what_the_function_raises_is_raised(map_batches):
    seen = []
    with pytest.raises(ConfigError, match=r"^three is not allowed$"):
        seen.extend(map_batches(fail_at_three, batches(9)))
    assert [*seen, *map_batches(shout, [[b"x"]])][-1] == [b"X"]


def test_what_the_batches_raise_is_raised(map_batches):
    def broken():
        yield [b"a"]
        raise ConfigError("the file is damaged")

    with pytest.raises(ConfigError, match="the file is damaged"):
        list(map_batches(shout, broken()))


def test_it_can_be_left_in_the_middle(map_batches):
    results = map_batches(shout, batches(30))
    assert next(results) == [b"0"]
    if hasattr(results, "close"):
        results.close()
        assert list(results) == []


def test_large_batches_are_few_in_flight(monkeypatch):
    monkeypatch.setattr("tinyllm_ray.data.pool.BYTES_IN_FLIGHT", 10)
    taken = 0

    def counted():
        nonlocal taken
        for _ in range(6):
            taken += 1
            yield [b"x" * 8]

    for done, _ in enumerate(map_in_processes(shout, counted(), workers=WORKERS), start=1):
        assert taken - done <= 1


def test_processes_are_used_and_ended():
    pids = set(map_in_processes(who, batches(8), workers=WORKERS))
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_dies_is_one_clear_line():
    with pytest.raises(TinyllmRayError, match=r"a worker process was ended from outside.*run the same command again"):
        list(map_in_processes(die, batches(4), workers=WORKERS))


ORPHANS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_map_batches import batches, who
from tinyllm_ray.data.pool import map_in_processes
if __name__ == "__main__":
    results = map_in_processes(who, batches(100), workers=2)
    print(next(results), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("interrupted", [False, True], ids=["told", "interrupted"])
def test_workers_that_die_while_a_batch_is_sent_hang_nothing(interrupted):
    """More than a pipe holds: before 3.12 Python goes on writing it for dead workers, and waits for that at the end."""

    def sent():
        yield from [[bytes(2**20)]] * 2 * WORKERS
        if interrupted:
            time.sleep(1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if interrupted else TinyllmRayError):
        list(map_in_processes(die_later, sent(), workers=WORKERS))


def test_no_end_hangs_where_a_worker_died_while_it_wrote_a_result():
    results = map_in_processes(die_in_a_result, batches(4), workers=1)
    assert next(results) == [b"0"]
    while multiprocessing.active_children():
        time.sleep(0.01)
    closing = threading.Thread(target=results.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_a_worker_that_dies_in_a_result_is_one_clear_line_while_others_live():
    results = map_in_processes(die_in_a_result, batches(4), workers=WORKERS)
    with pytest.raises(TinyllmRayError, match="a worker process was ended from outside"):
        list(results)


def test_workers_do_not_outlive_a_killed_parent(child_environment, tmp_path):
    program = tmp_path / "orphans.py"
    program.write_text(ORPHANS)
    command = [sys.executable, str(program), os.path.dirname(__file__)]
    with subprocess.Popen(
        command, env=child_environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    gone = threading.Event()
    while not gone.wait(0.05):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            gone.set()
        else:
            with open(f"/proc/{worker}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    gone.set()
