"""The starter as it is, with candidates that only play their part: no PyTorch, so it is up in a moment.

A request's label names the part. `tests/train/test_launcher.py` runs it in place of Python.
"""

import math
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]

for _name in ("torch", "torch._dynamo", "torch._inductor", "torch._inductor.compile_fx"):
    sys.modules[_name] = types.ModuleType(_name)


class TrialRequest:
    """A request whose label is all that counts."""

    def __init__(self, label: str) -> None:
        self.label = label

    @classmethod
    def model_validate(cls, request: dict[str, Any]) -> "TrialRequest":
        return cls(request["label"])


def run_trial(request: TrialRequest, emit: Emit, *begin: float) -> None:
    print(f"{request.label} speaks")
    print(f"{request.label} complains", file=sys.stderr)
    emit({"event": "stage", "stage": "start"})
    PARTS[request.label](emit)


def reach_windows(emit: Emit, loss: float | None = 4.0) -> None:
    emit({"event": "stage", "stage": "compile", "seconds": 2.0, "stages": {"fork": 0.5, "runtime": 1.5}})
    emit({"event": "stage", "stage": "warmup", "seconds": 3.0})
    emit({"event": "stage", "stage": "windows", "seconds": 3.25})
    for index in range(2):
        window = {
            "index": index,
            "updates": 5,
            "targets": 640,
            "seconds": 0.5 + index,
            "targets_per_second": 640 / (0.5 + index),
            "data_wait_seconds": 0.0,
            "loss": loss,
            "grad_norm": 1.0,
            "timestamp": 7.0,
        }
        emit({"event": "window", "window": window})


def complete(emit: Emit, loss: float | None = 4.0, targets_per_second: float | None = 853.0) -> None:
    reach_windows(emit, loss)
    emit(
        {
            "event": "result",
            "seconds_per_update": 0.2,
            "targets_per_second": targets_per_second,
            "memory": {"used_bytes": 10, "total_bytes": 20},
            "devices": [{"kind": "cpu", "name": "cpu", "host": "here"}],
            "threads": 3,
        }
    )


def hang(emit: Emit) -> None:
    """As in C code that looks at no signal but SIGKILL."""
    reach_windows(emit)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        signal.pause()


def hang_with_a_helper(emit: Emit) -> None:
    """Like a compile worker: a process of its own in the candidate's group, named as a stage."""
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    emit({"event": "stage", "stage": str(helper.pid)})
    hang(emit)


def leave_a_helper(emit: Emit) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    emit({"event": "stage", "stage": str(helper.pid)})
    complete(emit)


def hang_in_exit(emit: Emit) -> None:
    complete(emit)
    signal.pause()


def stop_itself(emit: Emit) -> None:
    reach_windows(emit)
    os.kill(os.getpid(), signal.SIGSTOP)
    complete(emit)


def leave(emit: Emit) -> None:
    reach_windows(emit)
    os._exit(3)


def be_killed(emit: Emit) -> None:
    reach_windows(emit)
    os.kill(os.getpid(), signal.SIGKILL)


def crash(emit: Emit) -> None:
    reach_windows(emit)
    os.kill(os.getpid(), signal.SIGABRT)


def interrupt(emit: Emit) -> None:
    raise KeyboardInterrupt


def run_out_of_memory(emit: Emit) -> None:
    emit({"event": "error", "out_of_memory": True, "reason": "OutOfMemoryError: 3 GiB", "traceback": "long " * 10000})


def fail(emit: Emit) -> None:
    emit({"event": "error", "out_of_memory": False, "reason": "RuntimeError: no kernel", "traceback": ""})


PARTS: dict[str, Callable[[Emit], None]] = {
    "complete": complete,
    "not finite": lambda emit: complete(emit, loss=None),
    "no throughput": lambda emit: complete(emit, targets_per_second=None),
    "NaN for a throughput": lambda emit: complete(emit, targets_per_second=math.nan),
    "an infinite throughput": lambda emit: complete(emit, targets_per_second=math.inf),
    "hang": hang,
    "hang with a helper": hang_with_a_helper,
    "leave a helper": leave_a_helper,
    "hang in exit": hang_in_exit,
    "stop itself": stop_itself,
    "leave": leave,
    "be killed": be_killed,
    "crash": crash,
    "interrupt": interrupt,
    "run out of memory": run_out_of_memory,
    "fail": fail,
}


def wait_for_the_candidate() -> None:
    """The fork returns once the candidate has stopped itself, which then goes on."""
    stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)
    assert stopped is not None
    os.kill(stopped.si_pid, signal.SIGCONT)


def main() -> None:
    import tinyllm_ray.train

    for name, part in (("trial", run_trial), ("trial_request", TrialRequest)):
        module = types.ModuleType(f"tinyllm_ray.train.{name}")
        setattr(module, part.__name__, part)
        sys.modules[module.__name__] = module
        setattr(tinyllm_ray.train, name, module)

    from tinyllm_ray.train import starter

    gate = os.environ.get("PRETEND_STARTER_GATE")
    if gate:  # a pipe in a folder: imports take until somebody opens its other end
        open(gate).close()
    if os.environ.get("PRETEND_STARTER_LAGS"):
        os.register_at_fork(after_in_parent=wait_for_the_candidate)
    starter.serve(0, int(sys.argv[-1]))


if __name__ == "__main__":
    main()
