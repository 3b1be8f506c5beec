"""One candidate's whole life, in a process of its own: build the trainer, warm up, time windows, say what was seen.

What it says are plain events, so that whatever ends the process leaves the events before it standing:
`{"event": "stage", "stage": "start" | "compile" | "warmup" | "windows" | "proof", "seconds"}`, where the seconds are
those of the stage before (with `windows` those of the whole warm-up; `proof` has none, since windows tell their own;
`compile` also says the start's own stages, and the devices, which a candidate that fails later has run on, too),
`{"event": "window", "window": {...}}` and at the end either `{"event": "result", ...}`, with the proof and its faults,
or `{"event": "error", "out_of_memory", "reason"}`.
"""

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.staged import staged_copy
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.measure.gpu_sensors import open_sensors
from tinyllm_ray.measure.windows import measure
from tinyllm_ray.records import Proof
from tinyllm_ray.train.compile_artifact import save_compiled
from tinyllm_ray.train.compile_cache import given_folder
from tinyllm_ray.train.proof import Evidence, Watched, gather_evidence
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.trial_request import TrialRequest

Emit = Callable[[dict[str, Any]], None]


def run_trial(request: TrialRequest, emit: Emit, begin: float, clock: Clock = time.perf_counter) -> None:
    """Measure one candidate that began at `begin` on `clock`; every end, good or bad, is an event."""
    try:
        _measure_candidate(request, emit, begin, clock)
    except Exception as error:  # a trial ends here, whatever it raised; standard error is the candidate's log
        traceback.print_exc()
        emit(
            {
                "event": "error",
                "out_of_memory": is_out_of_memory(error),
                "reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            }
        )


def _open_tokens(request: TrialRequest) -> TokenCache | None:
    if request.protocol.data_mode == "synthetic":
        return None
    assert request.cache, "data mode real needs a cache"
    return staged_copy(open_cache(request.cache))


def _check_device(kind: str | None) -> None:
    """Raises ConfigError where the study's devices are of another kind than the one this process would run on."""
    if kind is not None and kind != ("cuda" if torch.cuda.is_available() else "cpu"):
        found = "no GPU" if kind == "cuda" else "a GPU"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "is not set")
        raise ConfigError(
            f"the study is for {kind}, and PyTorch {torch.__version__} finds {found} "
            f"(CUDA_VISIBLE_DEVICES: {visible}); install the PyTorch that fits, or start this node's Ray with its GPUs"
        )


def _measure_candidate(request: TrialRequest, emit: Emit, begin: float, clock: Clock) -> None:
    emit({"event": "stage", "stage": "start"})
    stages = {"fork": clock() - begin}
    _check_device(request.device_kind)
    config, cache = Config.model_validate(request.config), _open_tokens(request)
    with Trainer(config, cache, request.range_server) as trainer:
        stages |= trainer.stage_seconds
        seen_devices = devices()
        told = {"devices": [device.model_dump(mode="json") for device in seen_devices]}
        emit({"event": "stage", "stage": "compile", "seconds": clock() - begin, "stages": stages, **told})

        def first_update(seconds: float) -> None:
            emit({"event": "stage", "stage": "warmup", "seconds": seconds})

        def warm(seconds: float) -> None:
            emit({"event": "stage", "stage": "windows", "seconds": seconds})

        def window(seen: Any) -> None:
            emit({"event": "window", "window": seen.model_dump(mode="json")})

        watched = Watched(trainer)
        sensors = open_sensors(seen_devices[0].identifier)
        found = measure(watched, request.protocol, window, first_update, warm, clock, bar=request.bar, sensors=sensors)
        memory = trainer.peak_memory()  # before the proof, which takes of its own
        emit({"event": "stage", "stage": "proof"})
        proof_began = clock()
        if found.dominated:  # it cannot win, so nobody has to believe it
            evidence = Evidence(Proof(trajectory=watched.trajectory()))
        else:
            over = (cache, request.range_server) if request.parity else None
            evidence = gather_evidence(trainer, watched.trajectory(), over)
        emit(
            {
                "event": "result",
                "seconds_per_update": found.seconds_per_update,
                "targets_per_second": found.targets_per_second,
                "memory": memory.model_dump(mode="json"),
                "dominated": found.dominated,
                "threads": trainer.threads,
                "kernels": evidence.kernels and [kernel.model_dump(mode="json") for kernel in evidence.kernels],
                "proof": evidence.proof.model_dump(mode="json"),
                "faults": evidence.faults,
                "proof_seconds": clock() - proof_began,
            }
        )
        if request.compiled and config.execution.update != "eager" and not found.dominated and not evidence.faults:
            keep_compiled(Path(request.compiled))


def keep_compiled(path: Path) -> None:
    """Said after the result, which a folder that cannot be written must not cost."""
    folder = given_folder()
    try:
        save_compiled(path, Path(folder) if folder else None)
    except Exception:  # standard error is the candidate's log
        traceback.print_exc()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, the device's or the host's, is what was missing."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # These come as plain RuntimeErrors: cuBLAS and cuDNN handles, and PyTorch's CPU allocator.
    signs = (
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "CUDA out of memory",  # from inside the compiler, which wraps it
        "can't allocate memory",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
