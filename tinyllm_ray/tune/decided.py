"""From a study's end to the decision file, and from there to a training."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm_ray.config import Config, override
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import cuda_version, devices, installed_versions, usable_cores
from tinyllm_ray.promise import Promise
from tinyllm_ray.records import Device, TrialRecord
from tinyllm_ray.tune.decisions import (
    DECISIONS,
    Decision,
    Place,
    Shape,
    add_decision,
    find,
    nearest,
    read_decisions,
)
from tinyllm_ray.tune.promise import build_promise
from tinyllm_ray.tune.report import shortest_path, speedup

if TYPE_CHECKING:
    from tinyllm_ray.search.study import Study

_VERSIONS = ("torch", "triton", "tinyllm_ray")

_SHOWN_DIFFERENCES = 4


def decision_of(study: "Study", config: Config, out: Path) -> Decision | None:
    """What the study in `out` of the recipe of `config` came to; None without a verdict, or a device that is known."""
    selection = study.selection()
    if selection is None:
        return None
    record = selection.record
    selected = config.with_execution(record.execution)
    promise, ratio = build_promise(study, record, selected, out), speedup(study)
    if promise is None:
        return None
    return Decision(
        shape=Shape.of(config),
        place=_place_of(record),
        execution=selected.execution,
        promise=promise,
        speedup=ratio["ratio"] if ratio else None,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def record_decision(
    study: "Study", config: Config, out: Path, files: Iterable[Path], say: Callable[[str], None]
) -> None:
    """Add what the study in `out` came to to decision files, and say so; one that cannot be written costs itself."""
    decision = decision_of(study, config, out)
    if decision is None:
        return
    for file in files:
        try:
            added = add_decision(file, _seen_from(file, decision, out))
        except ConfigError as error:
            say(f"the decision is not added: {error}")
        else:
            shown = shortest_path(file)
            say(f"decision added to {shown}" if added else f"{shown}: a verified decision stands there, and stays")


def follow_decision(config: Config, file: str | Path, overrides: Iterable[str], say: Callable[[str], None]) -> Config:
    """`config` under the execution, and with the promise, that a decision file has for its shape here; says which.

    Settings of the execution among `overrides` (`section.key=value`) are the user's own and stay. Where nothing matches
    it says why, and `config` is returned as it is. Raises ConfigError where the file is missing or no decision file, or
    where the overrides and the decision do not go together.
    """
    path = Path(file)
    path = path / DECISIONS if path.is_dir() else path
    decisions, shape, place = read_decisions(path), Shape.of(config), place_here()
    decision = find(decisions, shape, place)
    if decision is None:
        say(f"{path}: {_why_none(nearest(decisions, shape, place))}; goes on with the configuration's own execution")
        return config
    promise = _found_from(path, decision.promise)
    own = [setting for setting in overrides if setting.strip().startswith("execution.")]
    say(
        f"{path}: the execution that study {promise.study} decided on ({decision.date[:10]}); {promise.low:,.0f} to "
        f"{promise.high:,.0f} targets/s are promised" + (f"; {' '.join(own)} as asked" if own else "")
    )
    decided = {"execution": decision.execution.model_dump(mode="json"), "tuned": promise.model_dump(mode="json")}
    values = config.model_dump(mode="json") | decided
    return override(values, str(path), own)


def _seen_from(file: Path, decision: Decision, out: Path) -> Decision:
    """With the compiled file's name, relative to the study's folder, as it holds beside the decision file."""

    def renamed(name: str) -> str:
        path, beside = (out / name).resolve(), file.resolve().parent
        return str(path.relative_to(beside) if path.is_relative_to(beside) else path)

    return decision.model_copy(update={"promise": decision.promise.naming(renamed)})


def _found_from(file: Path, promise: Promise) -> Promise:
    return promise.naming(lambda name: str(file.absolute().parent / name))


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
    return f"no decision for this recipe here; the nearest, of study {decision.promise.study}, has {shown}{more}"
