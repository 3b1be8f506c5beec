"""From a study's end to the decision file, and from there to a training."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm_ray.config import Config, override
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.measure.environment import cuda_version, devices, installed_versions, usable_cores
from tinyllm_ray.records import Device, TrialRecord
from tinyllm_ray.search.noise import spread_of
from tinyllm_ray.tune.decisions import (
    DECISIONS,
    Decision,
    Place,
    Promise,
    Shape,
    add_decision,
    find,
    nearest,
    read_decisions,
)

if TYPE_CHECKING:
    from tinyllm_ray.search.study import Study

_NINE_OF_TEN = 1.645
"""Standard deviations of a normal distribution."""

_VERSIONS = ("torch", "triton", "tinyllm_ray")

_SHOWN_DIFFERENCES = 4


def decision_of(study: "Study", study_id: str, config: Config) -> Decision | None:
    """What a study of the recipe of `config` came to; None without a verdict, or a device that is known."""
    selection, verified, baseline = study.selection(), study.verified(), study.baseline().record
    if selection is None or not selection.record.devices:
        return None
    record = selection.record
    sustained = verified.sustained_targets_per_second if verified else None
    expected = sustained or record.targets_per_second
    if not expected:
        return None
    records = [status.record for status in study.candidates() if status.record]
    # A training is one more process: its figure differs from the measured one by the noise of both.
    share = math.exp(_NINE_OF_TEN * math.sqrt(2) * spread_of(records).value)
    base = baseline.targets_per_second if baseline else None
    ratio = verified.speedup.ratio if verified and verified.speedup else None
    return Decision(
        shape=Shape.of(config),
        place=_place_of(record),
        execution=ExecutionConfig.model_validate(record.execution),
        promise=Promise(
            targets_per_second=expected,
            low=expected / share,
            high=expected * share,
            speedup=ratio or ((record.targets_per_second or 0.0) / base if base else None),
            verified=verified is not None,
        ),
        study=study_id,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def record_decision(
    study: "Study", study_id: str, config: Config, files: Iterable[Path], say: Callable[[str], None]
) -> None:
    """Add what a study came to to decision files, and say so; a file that cannot be written costs itself alone."""
    decision = decision_of(study, study_id, config)
    if decision is None:
        return
    for file in files:
        try:
            added = add_decision(file, decision)
        except ConfigError as error:
            say(f"the decision is not added: {error}")
        else:
            say(f"decision added to {file}" if added else f"{file}: a verified decision stands there, and stays")


def follow_decision(config: Config, file: str | Path, overrides: Iterable[str], say: Callable[[str], None]) -> Config:
    """`config` under the execution that a decision file has for its shape, here; says which, or why none.

    Settings of the execution among `overrides` (`section.key=value`) are the user's own and stay. Where nothing matches
    `config` is returned as it is. Raises ConfigError where the file is missing or no decision file, or where the
    overrides and the decision do not go together.
    """
    path = Path(file)
    path = path / DECISIONS if path.is_dir() else path
    decisions, shape, place = read_decisions(path), Shape.of(config), place_here()
    decision = find(decisions, shape, place)
    if decision is None:
        say(f"{path}: {_why_none(nearest(decisions, shape, place))}; goes on with the configuration's own execution")
        return config
    promise = decision.promise
    own = [setting for setting in overrides if setting.strip().startswith("execution.")]
    say(
        f"{path}: the execution that study {decision.study} decided on ({decision.date[:10]}); {promise.low:,.0f} to "
        f"{promise.high:,.0f} targets/s are promised" + (f"; {' '.join(own)} as asked" if own else "")
    )
    values = config.model_dump(mode="json") | {"execution": decision.execution.model_dump(mode="json")}
    return override(values, str(path), own)


def place_here() -> Place:
    """Where this process runs; on a GPU where torch is loaded and sees one."""
    versions = installed_versions()
    return _place(devices()[0], {name: versions[name] for name in _VERSIONS} | {"cuda": cuda_version()}, usable_cores())


def _place_of(record: TrialRecord) -> Place:
    environment = record.environment
    versions, cpu = environment.get("versions", {}), environment.get("cpu", {})
    known = {name: versions.get(name) for name in _VERSIONS} | {"cuda": environment.get("cuda")}
    return _place(record.devices[0], known, cpu.get("usable_cores"))


def _place(device: Device, versions: dict[str, str | None], cores: int | None) -> Place:
    return Place(device=device.name, cores=cores if device.kind == "cpu" else None, versions=versions)


def _why_none(found: tuple[Decision, list[str]] | None) -> str:
    if found is None:
        return "holds no decision yet"
    decision, apart = found
    shown = ", ".join(apart[:_SHOWN_DIFFERENCES])
    more = f" and {len(apart) - _SHOWN_DIFFERENCES} more" if len(apart) > _SHOWN_DIFFERENCES else ""
    return f"no decision for this recipe here; the nearest, of study {decision.study}, has {shown}{more}"
