"""What read-back statistics say: a metrics line an update, and which models stopped because they went non-finite."""

import math
from statistics import fmean
from typing import Any, NamedTuple

from tinyllm_ray.config import Config
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.state import RunState

Values = float | list[float]
"""Of one model, or of each model of a pack."""


class NonFinite(NamedTuple):
    """The update at which no model goes on, its weights as they were before it."""

    losses: list[float]
    grad_norms: list[float]
    models: list[int]
    """Which ones went non-finite at this update."""


def tally(
    config: Config, state: RunState, values: list[tuple[Values, Values]], rate: float
) -> tuple[list[dict[str, Any]], NonFinite | None]:
    """Count updates into `state`: their lines for metrics.jsonl, up to one at which no model goes on.

    `values` are losses and gradient norms, update by update, `rate` is targets a second. A model of a pack whose models
    are not mixed stops alone: its values are null from then on, and `loss` and `grad_norm` are the others' means.
    """
    lines: list[dict[str, Any]] = []
    for loss, grad_norm in values:
        losses, norms = _each(loss), _each(grad_norm)
        broken = [
            model
            for model, pair in enumerate(zip(losses, norms, strict=True))
            if not all(map(math.isfinite, pair)) and str(model) not in state.stopped
        ]
        apart = len(losses) > 1 and not config.packing.mixed
        if broken and (not apart or len(state.stopped) + len(broken) == len(losses)):
            return lines, NonFinite(losses, norms, broken)
        state.stopped |= {str(model): state.step + 1 for model in broken}
        living = [model for model in range(len(losses)) if str(model) not in state.stopped]
        line = _line(config, state, fmean(losses[m] for m in living), fmean(norms[m] for m in living), rate)
        if len(losses) > 1:
            alive = [model in living for model in range(len(losses))]
            line["losses"] = [loss if alive[model] else None for model, loss in enumerate(losses)]
            line["grad_norms"] = [norm if alive[model] else None for model, norm in enumerate(norms)]
        if config.packing.variants is not None:
            line["lrs"] = _rates(config, line["lr"])
        lines.append(line)
        state.step, state.loss = state.step + 1, line["loss"]
    return lines, None


def note_distance(state: RunState, line: dict[str, Any], distance: float | None) -> None:
    """Keep how far apart the models of a mixed pack are, in a metrics line too; None of others changes nothing."""
    if distance is not None and math.isfinite(distance):
        state.consensus_distance = line["consensus_distance"] = distance


def _line(config: Config, state: RunState, loss: float, grad_norm: float, rate: float) -> dict[str, Any]:
    return {
        "step": state.step + 1,
        "tokens": (state.step + 1) * config.targets_per_update,
        "loss": loss,
        "lr": learning_rate(config, state.step),
        "grad_norm": grad_norm,
        "tokens_per_second": rate,
        "training_seconds": state.training_seconds,
        "data_wait_seconds": state.data_wait_seconds,
    }


def _each(value: Values) -> list[float]:
    return value if isinstance(value, list) else [value]


def _rates(config: Config, rate: float) -> list[float]:
    """Each model's learning rate where the recipe's is `rate`: the same schedule on a peak of its own."""
    peak = config.optimizer.peak_learning_rate
    return [rate / peak * (own.peak_learning_rate or peak) for own in config.packing.each]
