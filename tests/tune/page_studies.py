"""What report pages are made of: the study recorded on an H200, one in which everything has happened, and a run."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyllm_ray import journal
from tinyllm_ray.records import (
    Device,
    Fate,
    KernelTime,
    Memory,
    Parity,
    Proof,
    Protocol,
    Purpose,
    Seconds,
    TrajectoryPoint,
    TrialRecord,
    Window,
)

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
BEGAN = 1_790_000_000.0


def record(
    candidate: str,
    rate: float | None,
    timestamp: float,
    *,
    seconds: Seconds | None = None,
    execution: dict[str, Any] | None = None,
    purpose: Purpose = "search",
    number: int | None = None,
    device: Device | None = None,
    **fields: Any,
) -> TrialRecord:
    """A trial's record whose windows end as its seconds say."""
    seconds = seconds or Seconds(start=0.6, compile=4.0, warmup=0.3, windows=5.1, proof=1.0, total=13.0)
    execution = execution or {}
    before = 1.0 + sum(value or 0.0 for value in (seconds.start, seconds.compile, seconds.warmup, seconds.windows))
    share = (seconds.windows or 0.0) / 3
    windows = [
        Window(
            index=index,
            updates=100,
            targets=3_276_800,
            seconds=share,
            targets_per_second=rate * factor,
            data_wait_seconds=0.0,
            loss=4.8,
            grad_norm=1.0,
            timestamp=timestamp + before - (2 - index) * share,
        )
        for index, factor in enumerate((0.998, 1.0, 1.003) if rate else ())
    ]
    values: dict[str, Any] = {
        "study": "study",
        "kind": "measurement",
        "fate": Fate.COMPLETE,
        "recipe_identity": "r",
        "execution_identity": json.dumps(execution, sort_keys=True),
        "cache_identity": "c",
        "source_identity": "s",
        "source_dirty": False,
        "protocol": Protocol(),
        "first_update_seconds": seconds.compile,
    }
    return TrialRecord(
        candidate=candidate,
        targets_per_second=rate,
        timestamp=timestamp,
        seconds=seconds,
        execution=execution,
        purpose=purpose,
        round=number,
        devices=[device or GPUS[0]],
        windows=windows,
        **(values | fields),
    )


GPUS = [
    Device(kind="cuda", name="NVIDIA H200", identifier=f"GPU-{index}a5f{index}e0{index}", host=f"node{index}")
    for index in range(3)
]


def h200_first_study() -> tuple[list[TrialRecord], dict[str, Any]]:
    """The recorded study: ten candidates one after the other on one H200, their executions read from their names."""
    known = json.loads((RESULTS / "h200_first_study.json").read_text())
    records, moment = [], BEGAN + 15
    for one in known["study"]["candidates"]:
        parts = one["candidate"].split("-")[1:]
        compiled = parts[1] == "compiled"
        execution = {
            "micro_batch_size": int(parts[0][2:]),
            "update": parts[1],
            "compile_mode": parts[2] if compiled else None,
            "sdpa_backend": parts[-2],
            "cpu_threads": int(parts[-1][1:]),
        }
        records.append(
            record(
                one["candidate"],
                one["targets_per_second"],
                moment,
                seconds=Seconds(**one["seconds"]),
                execution=execution,
                memory=Memory(**one["memory"]),
                environment=known["environment"],
            )
        )
        moment += one["seconds"]["total"] + 0.5
    summary = summary_of(records, "c17-mb32-compiled-default-cudnn-t1", known["study"]["elapsed_seconds"], 300.0)
    return records, summary | {"ended": known["study"]["ended"], "timestamp": moment + 2}


def eventful_study(text: str = "", candidates: int = 24) -> tuple[list[TrialRecord], dict[str, Any]]:
    """Three GPUs with controls, all fates, kernels, parity, a verification; `text` is in all that can hold it."""
    records: list[TrialRecord] = []
    for index, gpu in enumerate(GPUS):
        rate = 1_880_000 * (1.0, 0.993, 0.951)[index]
        records.append(
            record(f"control-{index}", rate, BEGAN + 20, execution={"update": "eager"}, device=gpu, purpose="control")
        )
    backends = ["auto", f"flash{text}", "cudnn", "efficient", "math"]
    fates = [fate for fate in Fate if fate != Fate.COMPLETE]
    for number in range(candidates):
        execution = {
            "micro_batch_size": (8, 16, 32, 64)[number % 4],
            "sdpa_backend": backends[number % 5],
            "update": "eager" if number % 7 == 1 else "compiled",
            "cpu_threads": 8 if number % 3 else None,
        }
        fate = fates[number // 4 % len(fates)] if number % 4 == 3 else Fate.COMPLETE
        rate = 1_400_000 * (1 + 0.2 * math.sin(number)) * (0.5 if execution["update"] == "eager" else 1.0)
        records.append(
            record(
                f"c{number:02d}{text}",
                rate if fate == Fate.COMPLETE else None,
                BEGAN + 40 + number // 3 * 15,
                execution=execution,
                device=GPUS[number % 3],
                fate=fate,
                reason=None if fate == Fate.COMPLETE else f"why it is {fate.value} {text}",
                kernels=_kernels(1.0 + number % 3 / 5, text),
                proof=Proof(
                    kernel_source="device",
                    profiled_updates=3,
                    attention_asked="auto",
                    attention_seen=["flash"],
                    parity=Parity(
                        updates=8,
                        targets=512,
                        loss=4.0,
                        reference_loss=4.0,
                        relative_loss_error=1e-6,
                        relative_gradient_error=2e-3,
                    ),
                    trajectory=[TrajectoryPoint(update=1, loss=10.4, grad_norm=1.0)],
                ),
                memory=Memory(peak_reserved_bytes=(8 + number % 4 * 7) * 2**30, total_bytes=140 * 2**30),
                configuration=f"candidates/c{number:02d}{text}.yaml",
                environment={"hostname": f"node{text}", "versions": {"torch": "2.13.0"}},
            )
        )
    best = max((one for one in records[3:] if one.targets_per_second), key=lambda one: one.targets_per_second or 0)
    base = records[3]
    for number in range(4):
        for turn, (one, rate) in enumerate(((base, 1_400_000 + 900 * number), (best, 1_680_000 - 700 * number))):
            moment = BEGAN + 170 + (2 * number + turn) * 14
            records.append(
                record(
                    f"{one.candidate}-v{number + 1}",
                    rate,
                    moment,
                    execution=one.execution,
                    purpose="verification",
                    number=number,
                )
            )
    return records, summary_of(records, best.candidate, 300.0, 600.0, base.candidate) | {
        "ended": f"space exhausted {text}",
        "verdict": f"{best.candidate} is faster {text}",
        "gpus": 3,
        "timestamp": BEGAN + 300,
    }


def summary_of(
    records: Iterable[TrialRecord], selected: str, elapsed: float, budget: float, baseline: str | None = None
) -> dict[str, Any]:
    """A summary as a study writes it, with what the page reads."""
    searched = [one for one in records if one.purpose == "search"]
    base = next(one for one in searched if one.candidate == (baseline or searched[0].candidate))
    return {
        "study": "study",
        "parameters": 20_000_000,
        "targets_per_update": 32_768,
        "gpus": 1,
        "budget_seconds": budget,
        "elapsed_seconds": elapsed,
        "ended": "space exhausted",
        "verdict": f"{selected}: the fastest",
        "baseline": {"candidate": base.candidate},
        "eager": {"candidate": next(one.candidate for one in searched if one.execution["update"] == "eager")},
        "selected": {"candidate": selected},
        "candidates": [
            {
                "candidate": one.candidate,
                "label": one.candidate.partition("-")[2].replace("-", " ") or f"candidate {one.candidate}",
                "state": one.fate.value,
                "detail": one.reason or "",
                "targets_per_second": one.targets_per_second,
                "seconds": one.seconds.total,
            }
            for one in searched
        ],
    }


def write_study(out: Path, records: Iterable[TrialRecord], summary: dict[str, Any] | None) -> Path:
    """The study's folder as a page's maker finds it."""
    out.mkdir(parents=True, exist_ok=True)
    journal.append_lines(out / "trials.jsonl", [one.model_dump(mode="json") for one in records])
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    return out


def metrics_line(step: int, **fields: Any) -> dict[str, Any]:
    values = {"loss": 10.0 - step / 100, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 2000.0}
    return {"step": step, "tokens": step * 512, **values, **fields}


RUN_METRICS = [metrics_line(step) for step in range(1, 101)]
RUN_EVALUATIONS = [
    {"step": 50, "split": "subset", "loss": 9.6},
    {"step": 100, "split": "validation", "loss": 9.1},
]
RUN_RESULT = {
    "status": "complete",
    "parameters": 514_608,
    "step": 100,
    "tokens": 51_200,
    "validation": {"loss": 9.1},
    "levels": {"uniform": 10.37, "unigram": 6.81},
    "start_seconds": {"imports": 2.5, "loader": 0.0, "first_update": 0.9},
    "training_tokens_per_second": 1315.5,
}


def write_run(out: Path) -> Path:
    """A training run's folder; `out` has to exist."""
    journal.append_lines(out / "metrics.jsonl", RUN_METRICS)
    journal.append_lines(out / "evaluations.jsonl", RUN_EVALUATIONS)
    (out / "result.json").write_text(json.dumps(RUN_RESULT))
    (out / "environment.json").write_text(json.dumps({"hostname": "<b>here</b>"}))
    return out


def _kernels(scale: float, text: str) -> list[KernelTime]:
    milliseconds = {
        "matmul": 9.1,
        "attention_forward": 2.2,
        "attention_backward": 4.1,
        "loss": 1.2,
        "norm": 0.9,
        "optimizer": 0.7,
        "copy": 0.3,
        "other": 0.05,
    }
    return [
        KernelTime(name=f"kernel_of_{category}{text}", category=category, milliseconds=value * scale, launches=12.0)  # type: ignore[arg-type]
        for category, value in milliseconds.items()
    ]
