"""A device whose processes are noisy as recorded ones are, and studies that verify executions on it.

Noise on log throughput: a process's own level (`process_spread`), its windows about it (`half_range`, that of three
windows of 100 updates, 1.7 s each; shorter and longer ones by the square root of their length), windows that
something interrupted (3% of them, 1 to 5% slow), and the device's drift.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Fate, Purpose, TrialRecord, Window
from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.verification import Done, Verification
from tinyllm_ray.search.verified import Verified

RATE = 1_900_000.0
TARGETS_PER_UPDATE = 32_768
REFERENCE_WINDOW_SECONDS = 1.7
_HALF_RANGE_OF_THREE = 0.846
"""Expected half range of three normal values, in standard deviations."""
START_SECONDS = 5.0
"""A process beside its updates: start, a warm compilation, warm-up, end."""

OUTLIERS = 0.03


@dataclass
class NoisyDevice:
    """Makes the records that processes of executions with known throughputs would leave."""

    process_spread: float = 0.0025
    half_range: float = 0.005
    drift_per_hour: float = 0.02
    """Standard deviation over devices of the relative change an hour; most of it while a device warms up."""
    outliers: float = OUTLIERS
    seed: int = 0
    now: float = 0.0
    runs: int = 0
    _random: random.Random = field(init=False)
    _drift: float = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._drift = self._random.gauss(0, self.drift_per_hour) / 3600

    def measure(
        self,
        identity: str,
        log_ratio: float,
        protocol: Protocol,
        purpose: Purpose = "search",
        number: int | None = None,
    ) -> TrialRecord:
        """Run a process whose execution has `log_ratio` against RATE; time passes."""
        self.runs += 1
        self.now += START_SECONDS
        level = log_ratio + self._random.gauss(0, self.process_spread)
        by_count = protocol.version == 2
        count = protocol.windows if by_count else max(protocol.windows, math.ceil(protocol.least_seconds / 0.5))
        windows = [self._window(index, level, REFERENCE_WINDOW_SECONDS if by_count else 0.5) for index in range(count)]
        rates = sorted(window.targets_per_second for window in windows)
        rate = (rates[(count - 1) // 2] + rates[count // 2]) / 2
        return a_record(
            identity,
            windows=windows,
            targets_per_second=rate,
            seconds_per_update=TARGETS_PER_UPDATE / rate,
            protocol=protocol,
            purpose=purpose,
            round=number,
            timestamp=self.now,
        )

    def _window(self, index: int, level: float, seconds: float) -> Window:
        spread = self.half_range / _HALF_RANGE_OF_THREE * math.sqrt(REFERENCE_WINDOW_SECONDS / seconds)
        self.now += seconds
        log = level + self._drift * self.now + self._random.gauss(0, spread)
        if self._random.random() < self.outliers:
            log -= self._random.uniform(0.01, 0.05)
        # Whole, as filling in defaults takes most of a simulation's time.
        return Window.model_construct(
            _fields_set=None,
            index=index,
            updates=100,
            targets=100 * TARGETS_PER_UPDATE,
            seconds=seconds,
            targets_per_second=RATE * math.exp(log),
            data_wait_seconds=0.0,
            loss=4.0,
            grad_norm=1.0,
            timestamp=self.now,
            gpu=None,
        )


def a_record(identity: str, fate: Fate = Fate.COMPLETE, device: str = "GPU-1", **fields: Any) -> TrialRecord:
    """A record of an execution, with what a verification looks at."""
    values = {
        "candidate": identity,
        "execution_identity": identity,
        "execution": {"name": identity},
        "fate": fate,
        "devices": [Device(kind="cuda", name="H200", identifier=device, host="here")],
    }
    return TrialRecord.model_construct(**values | fields)


@dataclass(frozen=True)
class Told:
    """What a study that verified found, and what it took."""

    verification: Verification
    outcome: Verified
    seconds: float
    processes: int
    reason: str


def predict(execution: Any, protocol: Protocol) -> float:
    windows = 3 * REFERENCE_WINDOW_SECONDS if protocol.version == 2 else max(2.0, protocol.least_seconds)
    return START_SECONDS + 1.1 * windows


def verify(
    device: NoisyDevice,
    log_ratios: dict[str, float],
    budget_seconds: float = math.inf,
    spread: Spread = CAUTIOUS_SPREAD,
    at_stake_seconds: float = math.inf,
) -> Told:
    """Search once, then verify all executions but the first, the baseline; within `budget_seconds`."""
    search = [device.measure(name, ratio, Protocol()) for name, ratio in log_ratios.items()]
    baseline, *finalists = log_ratios
    verification = Verification(search, baseline, finalists, predict, None, spread, at_stake_seconds)
    begin, before = device.now, device.runs
    while not isinstance(run := verification.ask(begin + budget_seconds - device.now), Done):
        name = run.candidate.execution_identity
        verification.tell(device.measure(name, log_ratios[name], run.protocol, "verification", run.round))
    outcome = verification.outcome()
    assert outcome is not None
    return Told(verification, outcome, device.now - begin, device.runs - before, run.reason)
