"""What read-back statistics say: a metrics line an update, and which models stopped because they went non-finite."""

import logging
import math
from statistics import fmean
from typing import Any, NamedTuple

from tinyllm_ray.config import Config
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.state import RunState

log = logging.getLogger(__name__)

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
        alone = len(losses) > 1 and not config.packing.mixed
        if broken and alone:
            state.stopped |= {str(model): state.step + 1 for model in broken}
            log.error("update %d: models %s went non-finite and stay as they were", state.step + 1, broken)
        if len(state.stopped) == len(losses) or (broken and not alone):
            return lines, NonFinite(losses, norms, broken)
        living = [model for model in range(len(losses)) if str(model) not in state.stopped]
        line = _line(config, state, fmean(losses[m] for m in living), fmean(norms[m] for m in living), rate)
        if len(losses) > 1:
            line |= {"losses": list(map(_known, losses)), "grad_norms": list(map(_known, norms))}
        lines.append(line)
        state.step, state.loss = state.step + 1, line["loss"]
    return lines, None


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


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
