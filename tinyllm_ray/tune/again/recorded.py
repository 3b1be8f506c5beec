"""A study as its folder tells it: its recipe, space, objective and summary, and what is another here than it was."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinyllm_ray.clock import parse_duration
from tinyllm_ray.cluster.gpu_models import model_called
from tinyllm_ray.config import Config, validate
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import collect_environment, devices, source_identity
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, TrialRecord
from tinyllm_ray.search.fitting import DeviceKind, FittedSpace
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.summary import read_summary
from tinyllm_ray.tune.claim import claim
from tinyllm_ray.tune.folder import DEFINITION, Earlier, open_folder
from tinyllm_ray.tune.request import PLANNED_RUNS
from tinyllm_ray.tune.several_folder import refuse_several

if TYPE_CHECKING:
    from tinyllm_ray.cluster.connect import Connection

_DIGITS: Final = 12
"""Of a hash, for people."""
_VERSIONS: Final = ("torch", "triton")
"""Of packages, which figures depend on."""


@dataclass(frozen=True)
class RecordedStudy:
    """What a study's folder tells."""

    out: Path
    earlier: Earlier
    summary: Mapping[str, Any]
    """Empty where the study was killed before its first report."""

    @property
    def records(self) -> list[TrialRecord]:
        return self.earlier.records

    @cached_property
    def config(self) -> Config:
        """The recipe."""
        return validate(self.earlier.definition.recipe, str(self.out / DEFINITION))

    @property
    def searched(self) -> list[TrialRecord]:
        """The search's records, oldest first; the first is the baseline's."""
        return [record for record in self.records if record.purpose == "search"]

    @property
    def reference(self) -> TrialRecord:
        """The last record that tells what it was measured with."""
        return next((record for record in reversed(self.records) if record.environment), self.records[-1])

    @cached_property
    def baseline(self) -> dict[str, Any]:
        """The baseline's execution."""
        told = self.summary.get("baseline")
        return dict(told["execution"] if told else self.searched[0].execution)

    @property
    def budget_seconds(self) -> float:
        told = self.summary.get("budget_seconds")
        return parse_duration(self.earlier.definition.budget) if told is None else float(told)

    @property
    def objective(self) -> Objective:
        """As the study had it, or as a study has it by default."""
        if told := self.summary.get("objective"):
            return Objective(**told)
        apart = 1 if self.config.packing.mixed else self.config.packing.models
        return Objective("training", float(self.config.token_budget) * apart, PLANNED_RUNS)

    def space(self, device_kind: DeviceKind, cores: int) -> FittedSpace:
        """The space as it was fitted; where the definition does not hold it, what the records show of it."""
        settled = self.earlier.definition.model_dump().get("settled_space") or {
            "baseline": self.baseline,
            "factors": _seen_values([record.execution for record in self.searched] or [self.baseline]),
            "when": {},
            "protocol": self.summary.get("protocol") or self._recorded_protocol(),
        }
        search_windows = settled.get("search_windows", "by_count")  # as before there was a choice
        when = {key: {other: tuple(values) for other, values in one.items()} for key, one in settled["when"].items()}
        return FittedSpace(
            name=self.earlier.definition.space,
            device_kind=device_kind,
            cores=cores,
            baseline=settled["baseline"],
            factors={key: tuple(values) for key, values in settled["factors"].items()},
            when=when,
            protocol=Protocol.model_validate(settled["protocol"]),
            parameters=self.config.model.parameters,
            targets_per_update=self.config.targets_per_update,
            notes=tuple(self.summary.get("space_notes") or ()),
            search_windows=search_windows,
        )

    def record_of(self, name: str) -> TrialRecord:
        """The last record of the candidate called so, by its whole name or the part before its first dash.

        A name of verification's or of a repeat stands for the candidate. Raises ConfigError naming near ones.
        """
        known = {record.candidate: record for record in self.searched}
        own = [one.execution_identity for one in self.records if one.candidate == name]
        found = [one for one in known.values() if one.execution_identity in own[-1:]]
        found = found or [one for one in known.values() if one.candidate.partition("-")[0] == name]
        if len(found) == 1:
            return found[0]
        if name in [row["candidate"] for row in self.summary.get("candidates") or ()]:
            raise ConfigError(f"{self.out}: {name} was not measured yet; the study goes on with --resume")
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or [one for one in known if name in one][:3]
        shown = f"did you mean {' or '.join(near)}?" if near else f"it measured {', '.join(known) or 'none'}"
        raise ConfigError(f"{self.out}: the study has no candidate {name!r}; {shown}")

    def _recorded_protocol(self) -> dict[str, Any]:
        known = [record.protocol for record in self.searched if record.protocol]
        return (known[0] if known else Protocol()).model_dump()


def open_study(out: Path) -> RecordedStudy:
    """The study in `out`, which no other process measures for until this one ends. Raises ConfigError."""
    refuse_several(out)
    if not (out / DEFINITION).is_file():
        raise ConfigError(f"{out}: there is no study here ({DEFINITION} is missing)")
    claim(out / DEFINITION)
    earlier = open_folder(out, resume=True)
    assert earlier is not None
    if not any(record.purpose == "search" for record in earlier.records):
        raise ConfigError(f"{out}: the study has measured nothing yet; go on with it with --resume")
    return RecordedStudy(out, earlier, read_summary(out))


def changes_since(record: TrialRecord, cache_identity: str | None) -> list[str]:
    """What a process would differ in from the record's, before its device is known: source, tokens, versions.

    Each as `X is NOW, was THEN`; what the record does not tell is left out.
    """
    here, there = collect_environment(), record.environment
    now = {"source of tinyllm_ray": source_identity().sha256, "token cache": cache_identity}
    was = {"source of tinyllm_ray": record.source_identity, "token cache": record.cache_identity}
    if there:
        now |= {"CUDA": here["cuda"]} | {name: here["versions"].get(name) for name in _VERSIONS}
        was |= {"CUDA": there.get("cuda")} | {name: there.get("versions", {}).get(name) for name in _VERSIONS}
    return [f"{name} is {_short(now[name])}, was {_short(was[name])}" for name in now if now[name] != was[name]]


def measured_on(recorded: Sequence[TrialRecord]) -> Device | None:
    """The device of the last record that tells one."""
    return next((record.devices[0] for record in reversed(recorded) if record.devices), None)


def device_changes(
    was: Device | None, device_kind: DeviceKind, here: bool, accelerators: Sequence[str] = ()
) -> list[str]:
    """Whether the devices are of another kind than a recorded one: cuda or cpu; where they are `here`, on this machine,
    by their name; and by the models that Ray tells."""
    if was is None:
        return []
    if was.kind != device_kind:
        return [f"device is {device_kind}, was {was.kind} ({was.name})"]
    names = _names_here(device_kind) if here else []
    if names and was.name not in names:
        return [f"device is {' and '.join(names)}, was {was.name}"]
    other = accelerators and model_called(was.name, accelerators) is None
    return [f"device is {' and '.join(accelerators)}, was {was.name}"] if other else []


def held_to_kind_of(was: Device | None, cluster: "Connection") -> "Connection":
    """The cluster for trials on GPUs of a recorded device's kind, where it has that one among others; else as it is."""
    from tinyllm_ray.cluster.connect import held_to

    if was is None or len(cluster.accelerators) < 2:
        return cluster
    model = model_called(was.name, cluster.accelerators)
    return cluster if model is None else held_to(cluster, model)


def _names_here(device_kind: DeviceKind) -> list[str]:
    if device_kind == "cpu":
        return [device.name for device in devices() if device.kind == "cpu"]
    return sorted({str(gpu["name"]) for gpu in collect_environment()["gpus"] or []})


def _seen_values(executions: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The values of each setting in which the executions differ; of the micro-batch at least its own."""
    values = {key: tuple(dict.fromkeys(one.get(key) for one in executions)) for key in executions[0]}
    varied = {key: seen for key, seen in values.items() if len(seen) > 1}
    return varied or {"micro_batch_size": values["micro_batch_size"]}


def _short(value: str | None) -> str:
    return "none" if value is None else value[:_DIGITS] if len(value) > 40 else value
