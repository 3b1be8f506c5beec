"""Replays whole studies against recorded or made-up figures under a simulated clock."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyllm_ray.config import Config, load
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Fate, Memory, Seconds, TrialRecord, Window
from tinyllm_ray.search.answers import Finished, Trial, Wait
from tinyllm_ray.search.candidate import Candidate
from tinyllm_ray.search.cost import USUAL_WARMUP
from tinyllm_ray.search.fitting import DeviceKind, FittedSpace, fit_space
from tinyllm_ray.search.noise import device_name
from tinyllm_ray.search.space import Space
from tinyllm_ray.search.study import Study

# One GH200, 20m at 32,768 tokens an update, 20 + 3 x 100 updates:
# settings: (targets/s of the windows), first update seconds, all warm-up seconds.
GH200_20M: dict[tuple[int, str, str | None, str, int], tuple[tuple[int, int, int], float, float]] = {
    (4, "eager", None, "auto", 8): ((122794, 126572, 128225), 0.70, 5.74),
    (8, "eager", None, "auto", 8): ((264553, 253441, 262313), 0.62, 3.05),
    (16, "eager", None, "auto", 8): ((500209, 487974, 494537), 0.56, 1.82),
    (32, "eager", None, "auto", 8): ((613093, 621548, 623264), 0.58, 1.66),
    (4, "compiled", "default", "auto", 8): ((367885, 369757, 369209), 18.12, 19.82),
    (8, "compiled", "default", "auto", 8): ((721578, 736292, 748620), 3.31, 4.20),
    (16, "compiled", "default", "auto", 8): ((1187323, 1202439, 1177407), 3.29, 3.81),
    (32, "compiled", "default", "auto", 8): ((1261617, 1263308, 1262529), 18.31, 18.81),
    (32, "compiled", "default", "flash", 8): ((1263664, 1264086, 1254207), 3.63, 4.12),
    (32, "compiled", "default", "cudnn", 8): ((1264060, 1260891, 1262468), 3.25, 3.75),
    (16, "compiled", "default", "flash", 8): ((1192462, 1197560, 1186462), 3.42, 3.94),
    (16, "compiled", "default", "cudnn", 8): ((1200334, 1198838, 1189845), 2.88, 3.39),
    (32, "compiled", "reduce-overhead", "flash", 8): ((1230751, 1221936, 1224296), 15.03, 15.70),
    (32, "compiled", "max-autotune", "flash", 8): ((1286077, 1273334, 1265530), 129.09, 129.66),
    (32, "compiled", "max-autotune", "flash", 4): ((1278830, 1273973, 1272586), 2.80, 3.35),
    (32, "compiled", "max-autotune", "flash", 1): ((1279606, 1279245, 1274999), 2.82, 3.36),
}

GH200_SPACE = Space.model_validate(
    {
        "name": "gh200",
        "baseline": {"update": "compiled"},
        "factors": {
            "micro_batch_size": [4, 8, 16, 32],
            "update": ["eager", "compiled"],
            "compile_mode": ["default", "reduce-overhead", "max-autotune"],
            "sdpa_backend": ["auto", "flash", "cudnn"],
            "cpu_threads": [1, 4, 8],
        },
        "when": {"compile_mode": {"update": "compiled"}},
    }
)

START_SECONDS, REST_SECONDS = 2.0, 1.0


def fitted(
    space: Space = GH200_SPACE, preset: str = "20m-32k", kind: DeviceKind = "cuda", cores: int = 16
) -> FittedSpace:
    return fit_space(space, load(preset), kind, cores)


def recipe(rows: int, context: int = 256) -> Config:
    return load("nano", [f"model.context={context}", f"training.tokens_per_update={rows * context}"])


def record(
    candidate: Candidate, fate: Fate = Fate.COMPLETE, rates: tuple[float, ...] = (), **fields: Any
) -> TrialRecord:
    """A record with the windows' targets a second; further fields as they are."""
    median = sorted(rates)[len(rates) // 2] if rates else None
    values = {
        "study": "test",
        "candidate": candidate.id,
        "kind": "measurement",
        "fate": fate,
        "recipe_identity": "recipe",
        "execution_identity": candidate.execution_identity,
        "cache_identity": None,
        "source_identity": "source",
        "source_dirty": None,
        "execution": candidate.execution,
        "windows": [_window(index, rate) for index, rate in enumerate(rates)],
        "targets_per_second": median,
        "seconds_per_update": 32768 / median if median else None,
        "timestamp": 0.0,
    }
    return TrialRecord.model_validate(values | fields)


def _window(index: int, rate: float) -> Window:
    return Window(
        index=index,
        updates=100,
        targets=3276800,
        seconds=3276800 / rate,
        targets_per_second=rate,
        data_wait_seconds=0.0,
        loss=None,
        grad_norm=None,
        timestamp=0.0,
    )


def key(execution: Mapping[str, Any]) -> tuple[int, str, str | None, str, int]:
    names = ("micro_batch_size", "update", "compile_mode", "sdpa_backend", "cpu_threads")
    return tuple(execution[name] for name in names)  # type: ignore[return-value]


def _row(size: int, update: str, mode: str | None, sdpa: str, threads: int) -> tuple[tuple[float, ...], float, float]:
    """A row of the table, or for what the reference never ran one made up: as its nearest, 1% slower.

    Another number of threads needs no other compilation, so its first update is a warm one.
    """
    if row := GH200_20M.get((size, update, mode, sdpa, threads)):
        return row
    like = (
        (32, update, mode, "flash", 8)
        if mode in {"reduce-overhead", "max-autotune"}
        else (size, update, mode, "auto", 8)
    )
    rates, first, warmup = GH200_20M[like]
    warm = min(first, 3.3) if threads != 8 else first
    return tuple(rate * 0.99 for rate in rates), warm, warm + warmup - first


def gh200(trial: Trial) -> TrialRecord:
    """What the GH200 recorded for this candidate; by need as many windows of half a second."""
    rates, first, warmup = _row(*key(trial.candidate.execution))
    protocol = trial.protocol or Protocol()
    by_need = protocol.version == "adaptive"
    windows = sum(protocol.window_seconds if by_need else 3276800 / rate for rate in rates)
    warmup = first + (warmup - first) * (USUAL_WARMUP / 19 if by_need else 1)
    seconds = Seconds(
        start=START_SECONDS,
        compile=first,
        warmup=warmup - first,
        windows=windows,
        total=START_SECONDS + warmup + windows + REST_SECONDS,
    )
    memory = Memory(peak_reserved_bytes=1)
    return record(trial.candidate, rates=rates, seconds=seconds, memory=memory, protocol=protocol)


def fates(outcomes: Mapping[str, Fate]) -> Callable[[Trial], TrialRecord]:
    """As `gh200`, but candidates whose label begins like a key end as it says."""

    def outcome(trial: Trial) -> TrialRecord:
        for label, fate in outcomes.items():
            if trial.candidate.label.startswith(label):
                return record(trial.candidate, fate, reason=f"made {fate}")
        return gh200(trial)

    return outcome


@dataclass
class Replay:
    """What happened in a replayed study."""

    study: Study
    trials: list[Trial] = field(default_factory=list)
    records: list[TrialRecord] = field(default_factory=list)
    elapsed: float = 0.0
    finished: Finished | None = None

    @property
    def labels(self) -> list[str]:
        return [trial.candidate.label for trial in self.trials]


def actual_seconds(trial: Trial, result: TrialRecord) -> float:
    return result.seconds.total or 1.0


def on_device(result: TrialRecord, number: int, speed: float, timestamp: float) -> TrialRecord:
    """The result as a device of another speed would have given it."""
    place = Device(kind="cuda", name="GPU", identifier=f"GPU-{number}", host="node")
    rates = [window.targets_per_second * speed for window in result.windows]
    changes: dict[str, Any] = {"devices": [place], "timestamp": timestamp}
    if rates:
        changes["windows"] = [_window(index, rate) for index, rate in enumerate(rates)]
        changes["targets_per_second"] = sorted(rates)[len(rates) // 2]
    return result.model_copy(update=changes)


def replay(
    study: Study,
    outcome: Callable[[Trial], TrialRecord] = gh200,
    budget: float = math.inf,
    workers: int = 1,
    seconds: Callable[[Trial, TrialRecord], float] = actual_seconds,
    stop_after: int | None = None,
    most: int | None = None,
    speeds: Sequence[float] = (),
) -> Replay:
    """Run `study` to its end with `workers` trials at once; the clock is simulated.

    `stop_after` so many records, or start no more than `most` trials and wait for what runs. `speeds` are those of the
    workers' devices, where they have devices.
    """
    done = Replay(study)
    running: list[tuple[float, int, TrialRecord]] = []
    free, freed = list(range(len(speeds))), None
    while stop_after is None or len(done.records) < stop_after:
        full = len(running) >= workers or (most is not None and len(done.trials) >= most)
        if full and not running:
            break
        answer = Wait("all workers are busy") if full else study.ask(budget - done.elapsed, freed)
        if isinstance(answer, Trial):
            done.trials.append(answer)
            result = outcome(answer)
            if answer.stage in ("control", "verification"):
                result = result.model_copy(update={"purpose": answer.stage, "round": answer.round})
            if speeds:
                number = free[-1] if answer.device is None else int(answer.device.removeprefix("GPU-"))
                free.remove(number)
                result = on_device(result, number, speeds[number], done.elapsed)
            heapq.heappush(running, (done.elapsed + seconds(answer, result), len(done.trials), result))
        elif isinstance(answer, Wait):
            done.elapsed, _, result = heapq.heappop(running)
            done.records.append(result)
            study.tell(result)
            if speeds:
                freed = device_name(result)
                free.append(int(freed.removeprefix("GPU-")))
        else:
            assert not running
            done.finished = answer
            break
    return done
