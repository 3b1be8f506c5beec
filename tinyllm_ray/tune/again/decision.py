"""The decision that a configuration stands for, from the study's folder that it lies in or without one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.config import Config, identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.search.candidate import Candidate, make_candidate
from tinyllm_ray.search.fitting import DeviceKind, FittedSpace, fit_space
from tinyllm_ray.search.noise import Spread, device_name, spread_of
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.rates import fastest
from tinyllm_ray.search.validation import Claim, Question
from tinyllm_ray.summary import read_summary
from tinyllm_ray.tune.folder import TRIALS
from tinyllm_ray.tune.request import Asked

_NO_STUDY: Final = "no study beside it: the baseline is what a study would start from here"
_NOTHING: Final = "the selected execution is what a study starts from here, and no other is known; nothing to compare"


@dataclass(frozen=True)
class Decision:
    """What is put to the test, and what is known of it."""

    question: Question
    space: FittedSpace
    records: tuple[TrialRecord, ...]
    """The study's; none where there is no study."""
    summary: Mapping[str, Any]
    notes: tuple[str, ...]
    """On how the two executions were found, a line each."""

    @property
    def speedup(self) -> Mapping[str, Any] | None:
        """As the study found it: ratio, and low, high and pairs where it verified it."""
        found: Mapping[str, Any] | None = self.summary.get("speedup")
        return found

    def spread(self, device: str | None) -> Spread:
        """What the study's repeats tell of processes, if it ran on this device."""
        same = device is not None and any(device_name(record) == device for record in self.records)
        return spread_of(self.records, CAUTIOUS_SPREAD) if same else CAUTIOUS_SPREAD


def read_decision(selected: Path, config: Config, device_kind: DeviceKind, cores: int) -> Decision:
    """The decision for `config`, which is the content of `selected`, on devices of one kind. Raises ConfigError."""
    records, summary, notes = study_beside(selected, config)
    if not records:
        return _without_study(config, device_kind, cores, notes)
    question, more = _question(selected, config, records, summary)
    searched = _searched(records)
    protocol = Protocol.model_validate(summary.get("protocol") or searched[0].protocol or {})
    space = _space(config, device_kind, cores, dict(question.baseline.execution), protocol)
    return Decision(question, space, tuple(records), summary, (*notes, *more))


def refuse_early(selected: Path, config: Config, kinds: Collection[DeviceKind], cores: int) -> None:
    """Raises ConfigError where there is nothing to compare, whichever of `kinds` the devices are of.

    `cores` are those of a trial. Without a study both decide, and nothing is known early where there are no `kinds`.
    """
    records, summary, _ = study_beside(selected, config)
    if records:
        _question(selected, config, records, summary)
    elif kinds and all(_is_start(*_settled(config, kind, cores)) for kind in kinds):
        raise ConfigError(_NOTHING)


def _question(
    selected: Path, config: Config, records: Sequence[TrialRecord], summary: Mapping[str, Any]
) -> tuple[Question, list[str]]:
    """What the study beside `selected` leaves to be asked, with a line on what is odd about it."""
    winner = identity(config.execution.model_dump(mode="json"))
    searched = _searched(records)
    told = summary.get("baseline")
    baseline = dict(told["execution"] if told else searched[0].execution)
    named = {record.execution_identity: record for record in searched}
    if winner == identity(baseline):
        rest = [record for record in searched if record.execution_identity != winner]
        rival = fastest(rest)
        if rival is None:
            raise ConfigError(f"{selected}: the baseline is selected, and the study has no other that could be faster")
        return Question(_candidate(1, baseline, named), _candidate(2, rival.execution, named), "baseline"), []
    if _is_slower(summary, winner):
        raise ConfigError(
            f"{selected}: the study selected an execution that is slower than its baseline, for its start; "
            "pairs of processes compare speeds, so there is nothing here that they can tell"
        )
    execution = config.execution.model_dump(mode="json")
    question = Question(_candidate(1, baseline, named), _candidate(2, execution, named), _claim(summary, winner))
    chosen = summary.get("selected")
    as_selected = chosen is not None and identity(chosen["execution"]) == winner
    return question, [] if as_selected else ["its execution is not what the study beside it selected"]


def _searched(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.purpose == "search"]


def study_beside(selected: Path, config: Config) -> tuple[list[TrialRecord], dict[str, Any], list[str]]:
    """Records and summary of the study whose folder the file `selected` lies in, and a line where there is none."""
    folder = selected.parent
    records = read_records(folder / TRIALS)
    if not any(record.purpose == "search" for record in records):
        return [], {}, [_NO_STUDY]
    if records[0].recipe_identity != config.recipe_identity:
        return [], {}, [f"another recipe than that of the study beside it, so {_NO_STUDY}"]
    return records, read_summary(folder), []


def _without_study(config: Config, device_kind: DeviceKind, cores: int, notes: Sequence[str]) -> Decision:
    fitted, settled = _settled(config, device_kind, cores)
    if _is_start(fitted, settled):
        raise ConfigError(_NOTHING)
    question = Question(make_candidate(1, fitted.baseline), make_candidate(2, settled), "faster")
    return Decision(question, replace(fitted, name="validation"), (), {}, tuple(notes))


def _settled(config: Config, device_kind: DeviceKind, cores: int) -> tuple[FittedSpace, dict[str, Any]]:
    """What a study would try here, and the execution of `config` as it would run in it."""
    _, space, _ = Asked(config, None, {}).for_machine(device_kind)
    fitted = fit_space(space, config, device_kind, cores)
    # Settings left open are what they are in the baseline; null is a value of this one key.
    execution = config.execution.model_dump(mode="json")
    given = {key: value for key, value in execution.items() if value is not None or key == "packed_backward"}
    return fitted, replace(fitted, factors={}, when={}).settle(given)


def _is_start(fitted: FittedSpace, settled: Mapping[str, Any]) -> bool:
    return settled == fitted.baseline


def _candidate(number: int, execution: Mapping[str, Any], named: Mapping[str, TrialRecord]) -> Candidate:
    """Called as in the study, where it was measured there."""
    made = make_candidate(number, execution)
    known = named.get(made.execution_identity)
    return replace(made, id=known.candidate) if known else made


def _is_slower(summary: Mapping[str, Any], winner: str) -> bool:
    """Whether the study selected this execution though it found it slower than the baseline."""
    speedup, chosen = summary.get("speedup"), summary.get("selected")
    if not speedup or not chosen or identity(chosen["execution"]) != winner:
        return False
    if speedup.get("verified"):
        return bool(speedup.get("outcome") == "slower")
    return _claim(summary, winner) == "faster" and bool(speedup["ratio"] < 1)


def _claim(summary: Mapping[str, Any], winner: str) -> Claim:
    """What the study claimed of its choice; of what it did not select that it is faster."""
    speedup, chosen, baseline = (summary.get(name) for name in ("speedup", "selected", "baseline"))
    if not speedup or not chosen or identity(chosen["execution"]) != winner:
        return "faster"
    if speedup.get("verified"):
        return "faster" if speedup.get("outcome") == "faster" else "tie"
    return "tie" if baseline and baseline["candidate"] in (summary.get("ties") or ()) else "faster"


def _space(
    config: Config, device_kind: DeviceKind, cores: int, baseline: dict[str, Any], protocol: Protocol
) -> FittedSpace:
    return FittedSpace(
        name="validation",
        device_kind=device_kind,
        cores=cores,
        baseline=baseline,
        factors={},
        when={},
        protocol=protocol,
        parameters=config.model.parameters,
        targets_per_update=config.targets_per_update,
    )
