"""What a study is asked, as plain values that cross to its process, and what it is once all of it is checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tinyllm_ray.config import Config, load, validate
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.paths import shown, unusable
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.search.objective import Objective, ObjectiveKind
from tinyllm_ray.search.retry import fates_to_retry
from tinyllm_ray.search.space import SearchWindows, Space, load_space, parse_space
from tinyllm_ray.tune.decisions import read_decisions
from tinyllm_ray.validation import explain

PLANNED_RUNS = 100
"""Recipes that are tuned are run many times: sweeps over rates and seeds take dozens to hundreds of trainings."""


class StudyRequest(BaseModel):
    """A study as asked for; None is the default that fits the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    budget: str
    """The whole budget as it was given, like `45m`."""
    budget_seconds: float
    """Seconds left when the study's process starts."""
    total_seconds: float
    """The whole budget in seconds."""
    age_seconds: float
    """Of the budget, used up when the study's process starts."""
    recipe: str | dict[str, Any] | None = None
    """A preset's name, a YAML file's path or a whole configuration."""
    overrides: list[str] = []
    """`section.key=value`, applied to the recipe."""
    space: str | dict[str, Any] | None = None
    """A space's name, a YAML file's path or a whole space."""
    protocol: dict[str, Any] = {}
    """Fields of the protocol that replace the space's."""
    search_windows: SearchWindows | None = None
    """The space's unless given."""
    objective: ObjectiveKind = "training"
    """training: the seconds that all planned trainings take; throughput: targets a second, whatever a start takes."""
    runs: int = PLANNED_RUNS
    """Trainings planned with the answer: the search goes on while it saves more over them than it costs."""
    out: str
    resume: bool = False
    retry: list[str] = []
    """Fates of candidates that a study which goes on measures again, beside lost and timed-out ones."""
    address: str | None = None
    """A Ray cluster to join."""
    by_device: str | None = None
    """The one model of GPU to study, as Ray names it, on a cluster of several."""
    callbacks: dict[str, Any] | None = None
    """Ray Tune callbacks as `cluster.callbacks` packs them; None writes TensorBoard's event files."""
    presets: list[str] = []
    """Several recipes that share the budget (`tune.several`), in place of `recipe`."""
    decisions: list[Path] = []
    """Decision files that what the study comes to is added to."""

    def objective_of(self, config: Config) -> Objective:
        """What a study of this recipe is after."""
        apart = 1 if config.packing.mixed else config.packing.models
        return Objective(self.objective, float(config.token_budget) * apart, self.runs)


def request_of(**values: Any) -> StudyRequest:
    """A request of these values, of whatever type they are. Raises ConfigError naming the one that is not allowed."""
    try:
        return StudyRequest(**values)
    except ValidationError as error:
        raise ConfigError(explain(error, StudyRequest, "the request")) from None


@dataclass(frozen=True)
class Asked:
    """A request whose parts are sound by themselves; a part left open waits for the machine."""

    config: Config | None
    space: Space | None
    protocol: Mapping[str, Any]
    search_windows: SearchWindows | None = None

    def for_machine(self, device_kind: str) -> tuple[Config, Space, list[str]]:
        """Configuration and space, the open ones chosen for `device_kind`, and a line for each choice made."""
        on_gpu = device_kind == "cuda"
        notes = []
        config, space = self.config, self.space
        if config is None:
            name = "20m" if on_gpu else "nano"
            config = load(name)
            notes.append(f"preset {name}" + ("" if on_gpu else ": no GPU here; name another with --preset"))
        if space is None:
            space, note = _default_space(config, on_gpu)
            notes.append(note)
        if self.search_windows is not None:
            space = space.model_copy(update={"search_windows": self.search_windows})
        return config, with_protocol(space, self.protocol), notes


def check_request(request: StudyRequest) -> Asked:
    """Everything about a request that can be judged without the machine. Raises ConfigError."""
    recipe, space = request.recipe, request.space
    if why := unusable(Path(request.out)):
        raise ConfigError(f"--out {shown(request.out)}: {why}")
    if isinstance(recipe, dict):
        config: Config | None = validate(recipe, "configuration")
    elif recipe is None and request.overrides:
        raise ConfigError("--set changes a recipe: name it with --preset or --config as well")
    else:
        config = None if recipe is None else load(recipe, request.overrides)
    if isinstance(space, dict):
        checked: Space | None = parse_space(space, "space")
    else:
        checked = None if space is None else load_space(space)
    _check_protocol(request.protocol)
    fates_to_retry(request.retry, request.resume)
    if request.runs < 1:
        raise ConfigError(f"--runs: {request.runs} is no number of trainings; give 1 or more")
    for file in request.decisions:  # found at the study's end it would be too late
        nearest = next(parent for parent in file.absolute().parents if parent.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"--decisions {file}: it cannot be written in {nearest}; choose another file")
        if file.exists():
            read_decisions(file)
    if config is not None and config.data.cache is not None:
        # Trials run in folders of their own, so the path has to hold from anywhere.
        folder = Path(config.data.cache).expanduser().resolve()
        config = config.model_copy(update={"data": config.data.model_copy(update={"cache": str(folder)})})
    if config is not None:
        config = config.model_copy(update={"tuned": None})  # an earlier study's word, should it be one's answer
    return Asked(config, checked, request.protocol, request.search_windows)


def _default_space(config: Config, on_gpu: bool) -> tuple[Space, str]:
    """The space that fits recipe and machine, and a line about it."""
    packed = config.packing.models > 1
    if on_gpu:
        name = "packed" if packed else "execution"
        return load_space(name), f"space {name}"
    space, note = load_space("smoke"), "space smoke"
    if packed:
        key = "packed_backward"
        space = space.model_copy(update={"factors": {**space.factors, key: load_space("packed").factors[key]}})
        note += f" and {key} of space packed"
    return space, f"{note}: no GPU here; name another with --space"


def with_protocol(space: Space, changes: Mapping[str, Any]) -> Space:
    """The space with fields of its protocol replaced. Raises ConfigError."""
    return space.model_copy(update={"protocol": _check_protocol({**space.protocol.model_dump(), **changes})})


def _check_protocol(values: Mapping[str, Any]) -> Protocol:
    try:
        return Protocol.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Protocol, "protocol")) from None
