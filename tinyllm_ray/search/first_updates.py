"""First updates as records show them: how long each took, and whether its compilation was there already."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.kinds import compilation, kind_of
from tinyllm_ray.search.noise import device_name


class FirstUpdate(NamedTuple):
    """A first update that was seen."""

    execution: Mapping[str, Any]
    kind: str
    compilation: tuple[Any, ...] | None
    """None where it was cut."""
    warm: bool
    """Whether an earlier trial on that host had the same compilation."""
    seconds: float
    update: float
    """Part of `seconds` that any update takes."""

    @property
    def beside_update(self) -> float:
        """Seconds beside the update itself, a tenth at least."""
        return max(self.seconds - self.update, 0.1)


def first_updates(records: Iterable[TrialRecord]) -> list[FirstUpdate]:
    """Every first update of a study's `records`, both oldest first."""
    samples: list[FirstUpdate] = []
    seen: set[object] = set()
    for record in records:
        execution, made = record.execution, compilation(record.execution)
        host = record.devices[0].host if record.devices else None
        # Devices begin with the control at the same time, so that none finds another's compilation.
        where = (made, device_name(record)) if record.execution_identity in seen else (made, host)
        kind, update, seconds = kind_of(execution), record.seconds_per_update or 0.0, record.seconds.compile
        if seconds is None and record.fate == Fate.TIMED_OUT and record.seconds.total is not None:
            # Cut while it compiled: it takes at least that long, and must not be tried again as if it were quick.
            cut = record.seconds.total - (record.seconds.start or 0.0)
            samples.append(FirstUpdate(execution, kind, None, False, cut, update))
        elif seconds is not None and record.fate != Fate.OUT_OF_MEMORY:
            samples.append(FirstUpdate(execution, kind, made, where in seen, seconds, update))
            seen |= {(made, host), (made, device_name(record)), record.execution_identity}
    return samples
