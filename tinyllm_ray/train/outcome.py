"""What a candidate's process has said so far, how it ended, and the TrialRecord that both come to."""

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config, identity
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Fate, Memory, Seconds, TrialRecord, Window


@dataclass
class RunningCandidate:
    """What is known of a running candidate."""

    request: Mapping[str, Any]
    deadline: Deadline
    began: float
    timestamp: float
    pid: int | None = None
    import_seconds: float | None = None
    """What its starter took to import PyTorch and its compiler; of the starter's first candidate alone."""
    stage: str = "start"
    stage_seconds: dict[str, float] = field(default_factory=dict)
    start_stage_seconds: dict[str, float] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    """Where it runs, once it has begun there."""
    windows: list[Window] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the candidate's process."""
        if "devices" in event:
            self.devices = [Device.model_validate(device) for device in event["devices"]]
        match event["event"]:
            case "ready":
                self.import_seconds = event["import_seconds"]
            case "forked":
                self.pid = event["pid"]
            case "stage":
                if "seconds" in event:
                    self.stage_seconds[self.stage] = event["seconds"]
                self.start_stage_seconds |= event.get("stages", {})
                self.stage = event["stage"]
            case "window":
                self.windows.append(Window.model_validate(event["window"]))
            case "result":
                self.result = dict(event)
            case "error":
                self.error = dict(event)


def judge(candidate: RunningCandidate, event: Mapping[str, Any]) -> tuple[Fate, str | None]:
    """Fate and reason of a candidate whose process has ended."""
    if candidate.error is not None:
        fate = Fate.OUT_OF_MEMORY if candidate.error["out_of_memory"] else Fate.FAILED
        return fate, candidate.error["reason"]
    if event.get("status") == -signal.SIGTERM and candidate.result is None:
        # Nobody here sends it: a job that is preempted, or a node that shuts down. The candidate has no part in that.
        return Fate.LOST, f"ended by SIGTERM from outside during {candidate.stage}"
    if event["event"] == "starter_ended":
        return Fate.FAILED, "the starter process ended; its log is starter.log"
    if candidate.result is None:
        return Fate.FAILED, f"the process {_exit_words(event['status'])} during {candidate.stage}"
    if any(window.loss is None or window.grad_norm is None for window in candidate.windows):
        return Fate.INVALID, "the loss or the gradient norm is not finite"
    if faults := candidate.result.get("faults"):
        return Fate.INVALID, "; ".join(faults)
    if _figure(speed := candidate.result.get("targets_per_second")) is None:
        return Fate.INVALID, f"it reported {speed} targets/s, which cannot be compared"
    if reason := candidate.result.get("dominated"):
        return Fate.DOMINATED, reason
    return Fate.COMPLETE, None


def build_record(
    candidate: RunningCandidate,
    fate: Fate,
    reason: str | None,
    total_seconds: float,
    environment: Mapping[str, Any],
    source: Mapping[str, Any],
    compile_cache: str | None,
) -> TrialRecord:
    """The record of a candidate from what its process said before it ended."""
    request, result = candidate.request, candidate.result or {}
    config = Config.model_validate(request["config"])
    execution = config.execution.model_dump(mode="json")
    return TrialRecord(
        study=request["study"],
        candidate=request["candidate"],
        kind="measurement",
        purpose=request.get("purpose", "search"),
        round=request.get("round"),
        fate=fate,
        reason=reason,
        recipe_identity=config.recipe_identity,
        execution_identity=identity(execution),
        cache_identity=request["cache_identity"],
        source_identity=source["sha256"],
        source_dirty=source["dirty"],
        execution=execution,
        protocol=Protocol.model_validate(request["protocol"]),
        devices=candidate.devices,
        seconds=_seconds(candidate, total_seconds),
        start_stage_seconds=candidate.start_stage_seconds,
        windows=candidate.windows,
        first_update_seconds=candidate.stage_seconds.get("compile"),
        warmup_seconds=candidate.stage_seconds.get("warmup"),
        seconds_per_update=_figure(result.get("seconds_per_update")),
        targets_per_second=_figure(result.get("targets_per_second")),
        memory=Memory.model_validate(result.get("memory", {})),
        kernels=result.get("kernels"),
        proof=result.get("proof"),
        environment={
            **environment,
            "cpu_threads": result.get("threads"),
            "import_seconds": candidate.import_seconds,
        },
        compile_cache=compile_cache,
        configuration=request["configuration"],
        timestamp=candidate.timestamp,
    )


def _seconds(candidate: RunningCandidate, total_seconds: float) -> Seconds:
    """What each phase took; the warm-up's seconds hold those of the first update."""
    first, warmup = candidate.stage_seconds.get("compile"), candidate.stage_seconds.get("warmup")
    return Seconds(
        start=candidate.stage_seconds.get("start"),
        compile=first,
        warmup=None if warmup is None or first is None else warmup - first,
        windows=sum(window.seconds for window in candidate.windows) if candidate.windows else None,
        proof=(candidate.result or {}).get("proof_seconds"),
        total=total_seconds,
    )


def _figure(value: float | None) -> float | None:
    """The value, None where it is no positive number: nothing takes no time, and no end of it."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _exit_words(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    hint = ", perhaps by the kernel for want of memory" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"
