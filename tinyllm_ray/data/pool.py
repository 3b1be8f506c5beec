"""Maps a function over batches in worker processes: in order, few batches at a time, and all cores busy."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, TypeVar

from tinyllm_ray.errors import TinyllmRayError

B = TypeVar("B", bound=Iterable[Sized])
R = TypeVar("R")

BATCHES_A_WORKER: Final = 2
"""In flight: one that is worked on, and one that waits for its turn."""
BYTES_IN_FLIGHT: Final = 2**26
"""Of documents: they are held twice, here and where they are worked on."""
_LOOK_SECONDS: Final = 1.0
"""Between two looks at whether all workers live, where a result lets itself be waited for."""
_PRELOADED: Final = ["tinyllm_ray.data.encode", "tokenizers"]
_function: Callable[[Any], Any] | None = None


def map_in_processes(function: Callable[[B], R], batches: Iterable[B], *, workers: int) -> Iterator[R]:
    """`map(function, batches)` in `workers` processes. Raises what `function` raised; TinyllmRayError for a death."""
    # Not fork: threads of this process may hold locks. The fork server imports once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(function,))
    pending: deque[tuple[int, Future[R]]] = deque()
    try:
        in_flight = 0
        for batch in batches:
            size = sum(map(len, batch))
            while pending and (len(pending) >= BATCHES_A_WORKER * workers or in_flight + size > BYTES_IN_FLIGHT):
                done, future = pending.popleft()
                in_flight -= done
                yield _result(future, pool)
            pending.append((size, pool.submit(_run, batch)))
            in_flight += size
        while pending:
            yield _result(pending.popleft()[1], pool)
    except BrokenProcessPool:
        time.sleep(1.0)  # whatever ended it may be on its way to this process, and then is the better reason
        raise TinyllmRayError(
            "a worker process was ended from outside, as happens when memory runs out; "
            "run the same command again to go on, with fewer --workers if it was the memory"
        ) from None
    finally:
        _leave_pipes_to_workers(pool)
        pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[R], pool: ProcessPoolExecutor) -> R:
    """What a batch came to. Raises BrokenProcessPool where a worker is gone.

    The pool sees a death itself, but not one in the middle of a result: it waits for the rest of that, and the other
    workers for the lock that the dead one held. Two looks in a row find it, and the others are ended.
    """
    missed = False
    while not wait([future], timeout=_LOOK_SECONDS).done:
        workers = list((pool._processes or {}).values())  # None once the pool has seen a death
        missing, missed = missed, any(worker.exitcode is not None for worker in workers)
        if missing and missed:
            for worker in workers:
                worker.kill()
            raise BrokenProcessPool
    return future.result()


def _leave_pipes_to_workers(pool: ProcessPoolExecutor) -> None:
    """Let the pool's threads fail where all workers are gone, instead of waiting for them at a pipe for ever.

    This process holds the workers' ends open as well, though it uses neither. So the thread that sends batches would
    fill a pipe that nobody reads (python/cpython#94777; Python 3.11.7 closes that end), and the one that takes results
    would wait for the rest of one whose worker was ended while it wrote, in each of which `shutdown` waits for it.
    Workers have ends of their own.
    """
    batches, results = (getattr(pool, name, None) for name in ("_call_queue", "_result_queue"))
    if batches is not None:
        batches._reader.close()
    if results is not None:
        results._writer.close()


def _start(function: Callable[[Any], Any]) -> None:
    """Prepare a worker process."""
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    # A worker waits for work and would not notice that a killed parent sends none.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(batch: Any) -> Any:
    assert _function is not None
    return _function(batch)
