"""What a process of `update_kinds.py` does: measures one program, the trainer or plain PyTorch, and prints JSON."""

import json
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from plain_pytorch import Plain

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.measure.environment import devices
from tinyllm_ray.measure.kernels import record_kernels
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.measure.windows import measure
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.train.trainer import Trainer

PROFILING_SECONDS = 5.0
"""Most that reading kernels may take: an update of many micro-batches has thousands."""


def configuration(request: dict[str, Any]) -> Config:
    """The recipe and execution that are asked for. Raises ConfigError."""
    config = load(request["preset"], [f"training.tokens_per_update={request['tokens']}"])
    execution = {"micro_batch_size": request["micro_batch"], **(request["execution"] or {})}
    return config.with_execution(execution)


def open_program(request: dict[str, Any]) -> AbstractContextManager[Any]:
    """The trainer under the execution that is asked for, or plain PyTorch where there is none."""
    config = configuration(request)
    if request["execution"] is not None:
        return Trainer(config, open_cache(request["cache"]) if request["cache"] else None)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = config.batch_rows
    return nullcontext(Plain(config.model, rows, request["micro_batch"], device, compiled=request["plain_compiled"]))


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that one process shows; first update alone where only the compile cache is to be filled."""
    begin = time.perf_counter()
    with open_program(request) as program:
        start_seconds = time.perf_counter() - begin
        if request["prepare"]:
            program.step()
            program.synchronize()
            return {"first_update_seconds": time.perf_counter() - begin - start_seconds}
        protocol = Protocol(
            data_mode="real" if request["cache"] else "synthetic",
            warmup_updates=request["warmup"],
            windows=request["windows"],
            updates_per_window=request["updates"],
        )
        found = measure(program, protocol)
        # Before the profiler, which takes memory of its own. Not reset after the warm-up: what a graph allocates it
        # allocates at its capture, once.
        memory = peak_memory(program.device).model_dump(mode="json")
        return {
            "device": devices()[0].name,
            "start_seconds": start_seconds,
            "first_update_seconds": found.first_update_seconds,
            "warmup_seconds": found.warmup_seconds,
            "windows": [window.targets_per_second for window in found.windows],
            "losses": [window.loss for window in found.windows],
            "memory": memory,
            "kernels": kernels_of(program) if request["profile"] else None,
        }


def kernels_of(program: Any) -> list[dict[str, Any]]:
    """Those of an update."""
    profile = record_kernels(program.step, program.synchronize, program.device, limit_seconds=PROFILING_SECONDS)
    return [kernel.model_dump(mode="json") for kernel in profile.kernels]


def main() -> None:
    request = json.loads(sys.argv[1])
    try:
        found = probe(request)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        found = {"error": f"{type(error).__name__}: {first_line}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
