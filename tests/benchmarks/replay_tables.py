"""Recorded tables for the replay: what a GH200 and an H200 measured, the rest by what each setting did alone."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from replay_machine import Row, Table

from tinyllm_ray.config import identity, load
from tinyllm_ray.records import Fate, read_records
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.kinds import dimensions, kind_of
from tinyllm_ray.search.space import Space, load_space

RESULTS = Path(__file__).parent / "results"


def filled(space: FittedSpace, rows: Mapping[str, tuple[dict[str, Any], Row]]) -> Callable[[Mapping[str, Any]], Row]:
    """Recorded rows, and for the other executions the nearest recorded one, changed by what each setting did alone.

    `rows` are by identity, with their executions; that of the baseline has to be there.
    """
    base = dimensions(space.baseline)
    alone = _alone(
        [(_plain(execution), row.rate) for execution, row in rows.values() if row.fate == Fate.COMPLETE], base
    )

    def row_of(execution: Mapping[str, Any]) -> Row:
        if found := rows.get(identity(execution)):
            return found[1]
        wanted = _plain(execution)

        def far(item: tuple[dict[str, Any], Row]) -> tuple[int, int, int]:
            other = _plain(item[0])
            unlike = sum(wanted[key] != other[key] for key in wanted)
            return unlike, wanted["kind"] != other["kind"], wanted["micro_batch_size"] != other["micro_batch_size"]

        near, row = min(rows.values(), key=far)
        ratio = 1.0
        for key, value in _plain(near).items():
            if wanted[key] != value:
                ratio *= alone.get((key, wanted[key]), 1.0) / alone.get((key, value), 1.0)
        kind = next((other for one, other in rows.values() if kind_of(one) == wanted["kind"]), row)
        return Row(row.rate * ratio, row.deviations, kind.cold, kind.warm, row.fate, row.memory)

    return row_of


def _alone(rows: Sequence[tuple[dict[str, Any], float]], base: Mapping[str, Any]) -> dict[tuple[str, Any], float]:
    """By setting and value: the ratio to the baseline's value beside the baseline's other settings, or where that was
    not recorded the geometric mean over all that was recorded with both."""
    ratios: dict[tuple[str, Any], list[float]] = {}
    own: dict[tuple[str, Any], float] = {}
    for (one, rate), (other, plain) in itertools.permutations(rows, 2):
        changed = [key for key in one if one[key] != other[key]]
        if len(changed) != 1 or other[changed[0]] != base[changed[0]]:
            continue
        item = changed[0], one[changed[0]]
        ratios.setdefault(item, []).append(rate / plain)
        if all(other[key] == base[key] for key in other):
            own[item] = rate / plain
    return {item: geometric_mean(found) for item, found in ratios.items()} | own


def _plain(execution: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dimensions(execution).items() if key != "launches"}


def _table(
    name: str, space: Space, figures: Mapping[tuple[Any, ...], tuple[Any, ...]], keys: tuple[str, ...], **more: Any
) -> Table:
    """A table from settings in the order of `keys` to (windows' targets/s, cold, warm seconds, bytes)."""
    config = load("20m-32k")
    fitted = fit_space(space, config, "cuda", 16)
    rows = {}
    for settings, (rates, cold, warm, memory) in figures.items():
        changes = {key: value for key, value in zip(keys, settings, strict=True) if value is not None}
        execution = fitted.settle(changes)
        middle = sorted(rates)[len(rates) // 2]
        spread = tuple(rate / middle - 1 for rate in rates) if len(rates) > 1 else Row(1.0).deviations
        rows[identity(execution)] = execution, Row(middle, spread, cold, warm, memory=memory)
    return Table(name, fitted, filled(fitted, rows), float(config.token_budget), **more)


_KEYS = ("micro_batch_size", "update", "compile_mode", "sdpa_backend", "cpu_threads")


def gh200() -> Table:
    """One GH200, 20m at 32,768 targets an update; graph modes at smaller sizes as the graphs of an H200 lose."""
    eager, default, reduce, autotune = (0.6, 0.6), (18.2, 3.3), (15.0, 3.3), (129.1, 2.8)
    r = (1230751, 1221936, 1224296)
    figures: dict[tuple[Any, ...], tuple[Any, ...]] = {
        (4, "eager", None, "auto", 8): ((122794, 126572, 128225), *eager, 4e9),
        (8, "eager", None, "auto", 8): ((264553, 253441, 262313), *eager, 6e9),
        (16, "eager", None, "auto", 8): ((500209, 487974, 494537), *eager, 12e9),
        (32, "eager", None, "auto", 8): ((613093, 621548, 623264), *eager, 23e9),
        (4, "compiled", "default", "auto", 8): ((367885, 369757, 369209), *default, 1e9),
        (8, "compiled", "default", "auto", 8): ((721578, 736292, 748620), *default, 2e9),
        (16, "compiled", "default", "auto", 8): ((1187323, 1202439, 1177407), *default, 4e9),
        (32, "compiled", "default", "auto", 8): ((1261617, 1263308, 1262529), *default, 8e9),
        (32, "compiled", "default", "cudnn", 8): ((1264060, 1260891, 1262468), *default, 8e9),
        (16, "compiled", "default", "cudnn", 8): ((1200334, 1198838, 1189845), *default, 4e9),
        # What asked for flash ran cuDNN's kernels; as far below them as on an H200.
        (32, "compiled", "default", "flash", 8): ((1189000, 1188000, 1190000), *default, 8e9),
        (32, "compiled", "reduce-overhead", "auto", 8): (r, *reduce, 6e9),
        (16, "compiled", "reduce-overhead", "auto", 8): (tuple(0.93 * rate for rate in r), *reduce, 3e9),
        (8, "compiled", "reduce-overhead", "auto", 8): (tuple(0.81 * rate for rate in r), *reduce, 2e9),
        (4, "compiled", "reduce-overhead", "auto", 8): (tuple(0.65 * rate for rate in r), *reduce, 1e9),
        (32, "compiled", "max-autotune", "auto", 8): ((1286077, 1273334, 1265530), *autotune, 6e9),
        (32, "compiled", "max-autotune", "auto", 4): ((1278830, 1273973, 1272586), *autotune, 6e9),
        (32, "compiled", "max-autotune", "auto", 1): ((1279606, 1279245, 1274999), *autotune, 6e9),
        (16, "compiled", "max-autotune", "auto", 8): ((1180000, 1185000, 1190000), *autotune, 3e9),
        (8, "compiled", "max-autotune", "auto", 8): ((1030000, 1032000, 1035000), *autotune, 2e9),
        (4, "compiled", "max-autotune", "auto", 8): ((830000, 831000, 832000), *autotune, 1e9),
    }
    space = Space.model_validate(
        {
            "name": "gh200",
            "baseline": {"update": "compiled"},
            "factors": {
                "micro_batch_size": [4, 8, 16, 32],
                "update": ["eager", "compiled"],
                "compile_mode": ["default", "reduce-overhead", "max-autotune"],
                "sdpa_backend": ["auto", "flash", "cudnn"],
                "cpu_threads": [1, 4, 8],
            },
            "when": {"compile_mode": {"update": "compiled"}},
        }
    )
    return _table("gh200", space, figures, _KEYS, without=("gh200",), start=2.0, rest=1.0)


def h200() -> Table:
    """One H200, 20m at 32,768 targets an update, from the study and the compile modes in `results/`.

    The rates of graphs of whole updates and of compiled updates of 4 and 8 rows are those of ordinary PyTorch code.
    """
    study = json.loads((RESULTS / "h200_first_study.json").read_text())["study"]["candidates"]
    modes = json.loads((RESULTS / "h200_compile_modes.json").read_text())["trials"]
    default, graph = (20.0, 3.7), (21.0, 4.5)
    figures: dict[tuple[Any, ...], tuple[Any, ...]] = {
        (8, "compiled", "default", "auto", 8): ((701571, 671328, 702529), *default, 2e9),
        (4, "compiled", "default", "auto", 8): ((350000, 352000, 355000), *default, 1e9),
        (32, "graph", "default", "auto", 8): ((1879000, 1883000, 1881000), *graph, 8e9),
        (8, "graph", "default", "auto", 8): ((1588000, 1588500, 1587800), *graph, 3e9),
        (4, "graph", "default", "auto", 8): ((1271000, 1272000, 1272400), *graph, 2e9),
        (16, "graph", "default", "auto", 8): ((1750000, 1752000, 1751000), *graph, 4e9),
        # Not measured there: a GH200's gain and seconds.
        (32, "compiled", "max-autotune", "auto", 8): ((1905000, 1903000, 1907000), 130.0, 3.5, 6e9),
    }
    for trial in study:
        size, update, *mode, backend, threads = trial["candidate"].removeprefix("c")[3:].split("-")
        seconds = (0.6, 0.6) if update == "eager" else default
        settings = (int(size[2:]), update, mode[0] if mode else None, backend, int(threads[1:]))
        figures[settings] = tuple(trial["windows"]), *seconds, float(trial["memory"]["peak_reserved_bytes"])
    for trial in modes:
        if trial.get("compile_mode") == "reduce-overhead":
            size = int(trial["micro_batch_size"])
            figures[size, "compiled", "reduce-overhead", "auto", 8] = (
                (trial["targets_per_second"],), 21.0, 4.0, float(trial["memory"]["peak_reserved_bytes"]),
            )  # fmt: skip
    known = {key: load_space("execution").factors[key] for key in _KEYS}  # of kernels nothing was recorded
    space = Space.model_validate(
        load_space("execution").model_dump()
        | {"name": "h200", "factors": known, "when": {"compile_mode": {"update": ["compiled"]}}}
    )
    return _table("h200", space, figures, _KEYS, without=("h200",))


def recorded(path: Path, preset: str = "20m-32k") -> Table:
    """The records of `record_table.py`, or of a study: the first is the baseline's, repeats show warm starts."""
    records = read_records(path)
    factors: dict[str, list[Any]] = {}
    for record in records:
        for key, value in record.execution.items():
            if value is not None and value not in factors.setdefault(key, []):
                factors[key].append(value)
    space = Space.model_validate(
        {
            "name": path.stem,
            "baseline": records[0].execution,
            "factors": {key: values for key, values in factors.items() if len(values) > 1},
            "when": {"compile_mode": {"update": ["compiled"]}},
            "protocol": records[0].protocol.model_dump() if records[0].protocol else {},
        }
    )
    config = load(preset)
    kind = records[0].devices[0].kind if records[0].devices else "cuda"
    fitted = fit_space(space, config, kind, max(record.execution["cpu_threads"] for record in records))
    rows: dict[str, tuple[dict[str, Any], Row]] = {}
    warm: dict[str, float] = {}
    for record in records:
        execution, first = fitted.settle(record.execution), record.seconds.compile
        if identity(execution) in rows:
            warm[kind_of(execution)] = first or 4.0
            continue
        rates = [window.targets_per_second for window in record.windows] or [1.0]
        middle = sorted(rates)[len(rates) // 2]
        deviations = tuple(rate / middle - 1 for rate in rates)
        memory = float(record.memory.peak_reserved_bytes or 1e10)
        rows[identity(execution)] = execution, Row(middle, deviations, first or 20.0, 4.0, record.fate, memory)
    rows = {
        name: (one, replace(row, warm=min(row.cold, warm.get(kind_of(one), 4.0)))) for name, (one, row) in rows.items()
    }
    return Table(path.stem, fitted, filled(fitted, rows), float(config.token_budget), without=("h200", "x86"))
