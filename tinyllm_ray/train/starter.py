"""The process candidates are forked from: PyTorch and its compiler are imported, no device is touched.

`python -m tinyllm_ray.train.starter EVENTS_FD` reads TrialRequests, one JSON object a line, from standard input, forks
a process for each, one after the other, and writes events, one JSON object a line, to EVENTS_FD: its own (`ready`,
`ended` with the exit status) and, in between, the candidate's, `forked` with its process id first. End of input ends
the candidate and the starter. It is single-threaded, since only the forking thread lives on in a fork.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def serve(requests_fd: int, events_fd: int) -> None:
    """Fork one candidate a request until the input ends."""
    begin = time.perf_counter()
    import torch._dynamo  # before the fork: a candidate that imports them itself takes 4-8 s longer
    import torch._inductor.compile_fx  # noqa: F401

    from tinyllm_ray.train import trial  # noqa: F401

    child_ended, wakeup = os.pipe()
    for descriptor in (child_ended, wakeup):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    _send(events_fd, {"event": "ready", "import_seconds": time.perf_counter() - begin})
    waiting, child = b"", 0
    while True:
        readable, _, _ = select.select([requests_fd, child_ended], [], [])
        if child_ended in readable:
            os.read(child_ended, 4096)
            child = _reap(child, events_fd)
        if requests_fd in readable:
            data = os.read(requests_fd, 65536)
            if not data:
                end_group(child)
                return
            waiting += data
        while not child and b"\n" in waiting:
            line, waiting = waiting.split(b"\n", 1)
            child = _fork(json.loads(line), events_fd)


def _reap(child: int, events_fd: int) -> int:
    """The candidate still running, or 0 once its end is known and said."""
    if not child:
        return 0
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        return child
    end_group(child)  # what it left behind, compile workers for one
    _send(events_fd, {"event": "ended", "status": os.waitstatus_to_exitcode(status)})
    return 0


def open_log(path: Path) -> int:
    """A descriptor that appends to a log; where its folder is away, the log is lost and the candidate is not."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def end_group(leader: int) -> None:
    """Kill a candidate with everything in its process group; a group that is gone already is fine."""
    if leader:
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return


def _fork(request: dict[str, Any], events_fd: int) -> int:
    begin, starter = time.perf_counter(), os.getpid()
    pid = os.fork()
    if not pid:
        _live(request, events_fd, begin, starter)
    os.setpgid(pid, pid)  # as the candidate does: whoever is first, the group is there before anything is done with it
    return pid


def _live(request: dict[str, Any], events_fd: int, begin: float, starter: int) -> NoReturn:
    """The candidate's process, from the fork to its end."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(starter)
        # Said by the candidate itself: the starter may run again only after events of the candidate's.
        _send(events_fd, {"event": "forked", "pid": os.getpid()})
        log = open_log(Path(request.pop("log")))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from tinyllm_ray.train.trial import run_trial
        from tinyllm_ray.train.trial_request import TrialRequest

        run_trial(TrialRequest.model_validate(request), lambda event: _send(events_fd, event), begin)
        status = 0
    except BaseException:  # the process ends right below; its log keeps the reason
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with(starter: int) -> None:
    """Have Linux kill this process when the starter goes; elsewhere the end of its input is all there is."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:  # it went before Linux was told
            os._exit(1)


def _send(descriptor: int, event: dict[str, Any]) -> None:
    data = (json.dumps(event) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    serve(0, int(sys.argv[1]))
