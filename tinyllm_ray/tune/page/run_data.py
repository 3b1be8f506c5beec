"""What a training run's page says, drawn from what the run recorded: no file, no clock, no HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from tinyllm_ray.tune.page.study import flat

CURVES: Final = {
    "loss": "loss, nats a target",
    "tokens_per_second": "throughput, targets/s",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "consensus_distance": "distance between the pack's models",
}
"""Of a line of metrics.jsonl, as they are called on the page."""

_MOST_POINTS: Final = 300
"""Of a curve: nearly one a pixel of a phone; more updates than that are shown by their mean and their range."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive updates of a curve."""

    tokens: float
    """At their middle."""
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RunPage:
    """Everything the page shows."""

    status: str
    title: str
    result: Mapping[str, Any]
    curves: Mapping[str, tuple[Stretch, ...]]
    """By name in CURVES; those that were recorded."""
    evaluations: Mapping[str, tuple[tuple[float, float], ...]]
    """Tokens and loss by split, and by model where there are several."""
    levels: Mapping[str, float]
    """Losses to compare with: uniform and unigram."""
    start_seconds: Mapping[str, float]
    environment: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]


def run_data(
    result: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    environment: Mapping[str, Any],
) -> RunPage:
    """What there is to show; each of the four may be empty, as in a run that has only begun."""
    tokens = {line["step"]: line["tokens"] for line in metrics}
    splits: dict[str, list[tuple[float, float]]] = {}
    for line in evaluations:
        name = line["split"] + (f" {line['model']}" if "model" in line else "")
        if line["step"] in tokens and line["loss"] is not None:
            splits.setdefault(name, []).append((tokens[line["step"]], line["loss"]))
    parameters, models = result.get("parameters"), result.get("models") or 1
    size = f"{parameters / 1e6:.1f}M parameters" if parameters else "a model"
    return RunPage(
        status=str(result.get("status") or "unknown"),
        title=size + (f", {models} models" if models > 1 else ""),
        result=result,
        curves={name: points for name in CURVES if (points := stretches(metrics, name))},
        evaluations={name: tuple(points) for name, points in splits.items()},
        levels={name: level for name, level in (result.get("levels") or {}).items() if level is not None},
        start_seconds=result.get("start_seconds") or {},
        environment=flat(environment),
        facts=flat({name: result[name] for name in result if name not in ("start_seconds", "levels", "losses")}),
    )


def stretches(metrics: Sequence[Mapping[str, Any]], name: str, most: int = _MOST_POINTS) -> tuple[Stretch, ...]:
    """The curve `name` in at most `most` stretches of equally many updates; updates without a value are left out."""
    known = [(line["tokens"], line[name]) for line in metrics if line.get(name) is not None]
    length = max(1, -(-len(known) // most))
    found = []
    for start in range(0, len(known), length):
        part = known[start : start + length]
        values = [value for _, value in part]
        found.append(Stretch(fmean(moment for moment, _ in part), fmean(values), min(values), max(values)))
    return tuple(found)
