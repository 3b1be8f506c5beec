"""A study's controls: which device has to measure one, and the study's records as on one device at one time.

The control is the baseline. Every device measures it before anything else, and again after ten minutes of measuring
where that costs little of what is left; the baseline's own record is the first control of its device.
"""

import math
from collections.abc import Collection, Iterable
from typing import Final

from tinyllm_ray.measure.bounds import Bounds
from tinyllm_ray.measure.student import t_quantile
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.admission import Admission
from tinyllm_ray.search.answers import Trial, again
from tinyllm_ray.search.candidate import Candidate
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.device_blocks import Control, DeviceBlocks, DeviceSpeed
from tinyllm_ray.search.noise import device_name, spread_of
from tinyllm_ray.search.rates import rate
from tinyllm_ray.search.rounds import shortest

LARGEST_SHARE: Final = 0.02
"""Of the seconds left, for a further control."""

MOST_FAILURES: Final = 3
"""Controls that end without a figure before no more are asked for."""

_UNHEARD_OF: Final = "a device that no record names"


class Controls:
    """What a study of `devices` devices knows of them; `baseline` is the control's execution identity."""

    def __init__(self, baseline: str, devices: int = 1) -> None:
        self.records: list[TrialRecord] = []
        """Of the controls alone, whatever became of them; the baseline's own record is none of them."""
        self._baseline = baseline
        self._devices = devices
        self._begun = 0
        self._measured: list[TrialRecord] = []
        self._until: dict[str, float] = {}
        """By device, when its last trial ended, by the clock of its node."""
        self._blocks = DeviceBlocks(())

    def hear(self, record: TrialRecord) -> None:
        """Take any record of the search, oldest first."""
        if record.purpose == "control":
            self.records.append(record)
        if record.execution_identity == self._baseline:
            self._begun += 1
        if record.devices or rate(record) is not None:
            self._until[device_name(record)] = record.timestamp + (record.seconds.total or 0.0)
        if record.execution_identity == self._baseline and record.fate == Fate.COMPLETE and rate(record) is not None:
            self._measured.append(record)
            self._blocks = blocks_of(self._measured)

    # When a control is due

    def ask(
        self,
        device: str | None,
        baseline: Candidate,
        protocol: Protocol,
        cost: CostModel,
        admission: Admission,
        running: Collection[Trial],
    ) -> Trial | None:
        """The control that is to be measured now, if one is; `device` has just ended a trial, where that is known."""
        measuring = [trial.stage for trial in running if trial.stage in ("baseline", "control")]
        first = self._is_first_due(device, len(measuring))
        if not self._can_be_measured or not (first or self._is_due(device)):
            return None
        short = shortest(protocol)
        prediction = cost.predict(baseline.execution, protocol=short)
        if "baseline" in measuring:
            # What the other devices do until then takes no time from anything else.
            fits = prediction.expected_seconds <= admission.seconds_left
        else:
            cheap = first or prediction.expected_seconds <= LARGEST_SHARE * admission.seconds_left
            fits = cheap and admission.fits(baseline.execution, prediction)
        name = f"{baseline.id}-control{1 + len(self.records) + measuring.count('control')}"
        return Trial(again(baseline, name, "control"), "control", prediction, short) if fits else None

    def _is_first_due(self, device: str | None, measuring: int) -> bool:
        """Whether some device, and so perhaps this one, has not begun with the control."""
        known = {device_name(record) for record in self._measured}
        if device in known:
            return False
        # One that has run a trial without it came late, as in a study that goes on in another place.
        came_late = bool(known) and device in self._until
        return came_late or max(len(known), self._begun) + measuring < self._devices

    def _is_due(self, device: str | None) -> bool:
        if device not in self._until or not self._measured:
            return False
        return self._blocks.control_due(device, self._until[device])

    @property
    def _can_be_measured(self) -> bool:
        return sum(rate(record) is None for record in self.records) < MOST_FAILURES

    # What they say

    def levelled(self, records: Iterable[TrialRecord]) -> list[TrialRecord]:
        """The records as they would be on the first control's device at its time; what ran there is as it is."""
        return [_scaled(record, self._ratio(record, self._reference).rate) for record in records]

    def doubt(self, one: TrialRecord, other: TrialRecord) -> float:
        """Standard deviation of the logarithm of the two devices' ratio: 0 for one device that does not drift."""
        bounds = self._ratio(one, other)
        return math.log(bounds.high / bounds.low) / 2 / t_quantile(0.975, self._blocks.spread.degrees)

    def slowest(self, record: TrialRecord) -> float:
        """The least speed relative to the record's device that the device of the next trial may have."""
        devices = list(self._until)
        if len(devices) < self._devices and self._devices > 1:
            devices.append(_UNHEARD_OF)
        own, at = device_name(record), record.timestamp
        return min(
            (self._blocks.ratio(device, own, self._until.get(device, at), at).low for device in devices), default=1.0
        )

    def speeds(self) -> list[DeviceSpeed]:
        """All devices that have measured a control, the fastest first."""
        return self._blocks.speeds()

    @property
    def _reference(self) -> TrialRecord | None:
        return self._measured[0] if self._measured else None

    def _ratio(self, one: TrialRecord, other: TrialRecord | None) -> Bounds:
        if other is None:
            return Bounds(1.0, 1.0, 1.0)
        return self._blocks.ratio(device_name(one), device_name(other), one.timestamp, other.timestamp)


def blocks_of(measured: Iterable[TrialRecord]) -> DeviceBlocks:
    """The devices on which these records of one execution, all with a throughput, were measured; oldest first."""
    measured = list(measured)
    controls = [Control(device_name(one), one.timestamp, rate(one) or 0.0) for one in measured]
    return DeviceBlocks(controls, spread_of(measured))


def _scaled(record: TrialRecord, ratio: float) -> TrialRecord:
    """As on a device whose speed is 1/`ratio` of the record's."""
    if ratio == 1.0 or record.targets_per_second is None:
        return record
    windows = [
        window.model_copy(
            update={"targets_per_second": window.targets_per_second / ratio, "seconds": window.seconds * ratio}
        )
        for window in record.windows
    ]
    update = None if record.seconds_per_update is None else record.seconds_per_update * ratio
    return record.model_copy(
        update={
            "targets_per_second": record.targets_per_second / ratio,
            "seconds_per_update": update,
            "windows": windows,
        }
    )
