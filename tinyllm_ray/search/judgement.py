"""Whether a candidate learned what it should have: its losses and gradient norms beside the baseline's.

Candidates of a study share seed and data order, so that honest ones differ by rounding alone. The baseline's runs span
the band: however often it was measured, and judged by parity instead, since it has nothing else to be compared with.
"""

from collections.abc import Callable, Iterable

from tinyllm_ray.measure.band import EARLY_UPDATES, Trajectory, of_equal_runs, within_band
from tinyllm_ray.records import Fate, TrialRecord


def judged(
    record: TrialRecord, earlier: Iterable[TrialRecord], baseline: str, learning_rates: Callable[[int], float]
) -> TrialRecord:
    """`record` as it is, or invalid where it ran to its end and left the band of the reference runs in `earlier`.

    `baseline` is the baseline's execution identity; `learning_rates` says what the rates of the first n updates add up
    to. Without a reference run, or without an update in common with it, there is nothing to judge by.
    """
    reason = _strays(record, list(earlier), baseline, learning_rates)
    return record if reason is None else record.model_copy(update={"fate": Fate.INVALID, "reason": reason})


def _strays(
    record: TrialRecord, earlier: list[TrialRecord], baseline: str, learning_rates: Callable[[int], float]
) -> str | None:
    """Why the record's trajectory is not one of the reference's, in one line."""
    if record.fate != Fate.COMPLETE or record.execution_identity == baseline:
        return None
    own = _trajectory(record)
    runs = [(run, {point.update for point in run}) for run in _reference(record, earlier, baseline)]
    shared = {point.update for point in own if any(point.update in updates for _, updates in runs)}
    if record.cache_identity is None:
        # One synthetic batch is soon known by heart, and what rounding does to that nobody has measured.
        shared = shared.intersection(EARLY_UPDATES)
    float32 = all(device.kind == "cpu" for device in record.devices)
    band = {}
    for update in sorted(shared):
        # Controls are shorter than the baseline's own run, which must not cost the others their late updates.
        equal = [run for run, updates in runs if update in updates]
        band[update] = of_equal_runs(equal, learning_rates, float32=float32)[update]
    return within_band(own, band)


def _reference(record: TrialRecord, earlier: list[TrialRecord], baseline: str) -> list[Trajectory]:
    """The baseline's runs; where it has none that can be believed, those of the first eager execution that has."""
    equal = [
        other
        for other in earlier
        if other.fate == Fate.COMPLETE and _is_same_training(record, other) and _is_finite(_trajectory(other))
    ]
    names = {other.execution_identity: other.execution["update"] for other in equal}
    eager = (name for name, update in names.items() if update == "eager")
    wanted = baseline if baseline in names else next(eager, None)
    return [_trajectory(other) for other in equal if other.execution_identity == wanted]


def _is_same_training(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether equal updates of the two saw equal weights and tokens."""
    return (one.recipe_identity, one.cache_identity) == (other.recipe_identity, other.cache_identity)


def _is_finite(run: Trajectory) -> bool:
    return bool(run) and all(point.loss is not None and point.grad_norm is not None for point in run)


def _trajectory(record: TrialRecord) -> Trajectory:
    return record.proof.trajectory if record.proof is not None else []
