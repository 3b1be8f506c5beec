"""What `selected.yaml` promises: figures from the study's records, and the file of what its execution compiled."""

import contextlib
import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tinyllm_ray.config import Config
from tinyllm_ray.promise import CompiledFile, Promise
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.expected import expected_rate
from tinyllm_ray.search.noise import spread_of
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.launcher import COMPILED
from tinyllm_ray.tune.folder import CANDIDATES


def build_promise(study: Study, chosen: TrialRecord, config: Config, out: Path) -> Promise | None:
    """The promise of `config`, the selected configuration, whose record `chosen` is; None without a device to name."""
    if not chosen.devices:
        return None
    # By their numbers a candidate that was measured again would stand before those that compiled for it.
    known = [status.record for status in study.candidates() if status.record is not None]
    records = sorted(known, key=lambda record: record.timestamp)
    own = [record for record in records if record.execution_identity == chosen.execution_identity]
    expected = expected_rate(
        chosen, [record for record in own if record.purpose == "verification"], spread_of(records, CAUTIOUS_SPREAD)
    )
    proof, milliseconds = chosen.proof, defaultdict[str, float](float)
    for kernel in chosen.kernels or ():
        milliseconds[kernel.category] += kernel.milliseconds
    return Promise(
        study=chosen.study,
        candidate=chosen.candidate,
        workload=config.workload_identity,
        targets_per_second=expected.rate,
        low=expected.low,
        high=expected.high,
        processes=expected.processes,
        verified=expected.verified,
        start_seconds=_start_seconds(study, chosen, records),
        device_kind=chosen.devices[0].kind,
        device=chosen.devices[0].name,
        versions=_versions(chosen),
        attention=tuple(proof.attention_seen) if proof else (),
        kernel_milliseconds={name: round(time, 4) for name, time in milliseconds.items()},
        compiled=_compiled_file(own, out),
    )


def drop_compiled(out: Path, kept: CompiledFile | None) -> None:
    """Remove what candidates compiled, but for the file that is promised: a study leaves one, not dozens."""
    for path in (out / CANDIDATES).glob(f"*.{COMPILED}"):
        if kept is None or path != out / kept.file:
            with contextlib.suppress(OSError):
                path.unlink()


def _start_seconds(study: Study, chosen: TrialRecord, records: Sequence[TrialRecord]) -> float:
    """A candidate is forked where PyTorch is imported already; a training imports it itself."""
    space = study.space
    work = space.parameters * space.targets_per_update
    starts = CostModel(space.device_kind, work, study.protocol, tuple(records)).starts(chosen.execution)
    imports = [seconds for record in records if (seconds := record.environment.get("import_seconds")) is not None]
    return (median(imports) if imports else 0.0) + starts.start + starts.warm


def _versions(record: TrialRecord) -> dict[str, str]:
    environment = record.environment
    installed = environment.get("versions") or {}
    found = {name: installed.get(name) for name in ("torch", "triton")} | {"driver": environment.get("driver")}
    return {name: version for name, version in found.items() if version}


def _compiled_file(records: Sequence[TrialRecord], out: Path) -> CompiledFile | None:
    """Of the latest process of the execution that left one."""
    for record in reversed(records):
        file = Path(CANDIDATES) / f"{record.candidate}.{COMPILED}"
        with contextlib.suppress(OSError):
            status = (out / file).stat()
            return CompiledFile(
                file=str(file),
                sha256=_checksum(out / file, status.st_mtime_ns, status.st_size),
                machine=Path(record.compile_cache or "").name or "unknown",
                source=record.source_identity,
            )
    return None


@functools.lru_cache(maxsize=8)
def _checksum(path: Path, modified_ns: int, size: int) -> str:
    """Read once, though the report is written after every trial."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
