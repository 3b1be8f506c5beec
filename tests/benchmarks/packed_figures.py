"""A row's figures in `packed_models.py`: what its processes' trainings come to, its goals, ratios between ways."""

import sys
from statistics import median
from typing import Any

from packed_probes import common_rates

GOALS = {("packed4-20m-awc", 131_072): (2.0e6, 2.7e6), ("packed8-20m-awc", 131_072): (1.9e6, 2.6e6)}
"""Targets/s of a packed row, by preset and targets an update: compiled, and by the fast update."""
UNMIXED_GOAL = {("20m-32k", 8, 4): 2.0}
"""Packed over one after another, by preset, models and rows."""


def summarize(label: dict[str, Any], found: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A row's figures of what its processes' trainings say."""
    every = [training for process in found for training in process]
    windows = [training["windows"] for training in every]
    if len(found) > 1:
        rates = common_rates(windows, len(windows[0]))
    else:
        together = list(zip(*windows, strict=True))
        rates = [sum(w["targets"] for w in ws) / sum(w["seconds"] for w in ws) for ws in together]
    add = sum if len(found) > 1 else max
    memory = {}
    for key in every[0]["memory"]:
        values = [training["memory"][key] for training in every]
        whole = key in {"total_bytes", "device_used_bytes"}
        memory[key] = None if None in values else max(values) if whole else add(values)
    parts = every[0]["parts_seconds"]
    goals = GOALS.get((label["preset"], label["targets_per_update"])) if label["way"] == "packed" else None
    return {
        "device": every[0]["device"],
        "threads": every[0]["threads"],
        "targets_per_second": median(rates) if rates else None,
        "goals_targets_per_second": goals,
        "windows": rates,
        "memory": memory,
        "parts_seconds": parts and {part: median(one["parts_seconds"][part] for one in every) for part in parts},
        "start_seconds": [training["start_seconds"] for training in every],
        "first_update_seconds": [training["first_update_seconds"] for training in every],
        "losses": [ws[-1]["loss"] for ws in windows],
        "data_wait_seconds": sum(window["data_wait_seconds"] for ws in windows for window in ws),
    }


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each pack's best execution beside the best of the other ways and its goals."""
    best: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if row.get("targets_per_second"):
            ways = best.setdefault((row["preset"], row["models"], row["rows_a_model"]), {})
            way = "packed_in_processes" if row["packed_backward"] == "processes" else row["way"]
            ways[way] = max(row["targets_per_second"], ways.get(way, 0.0))
    lines = []
    for (preset, models, rows_a_model), ways in best.items():
        line: dict[str, Any] = {"preset": preset, "models": models, "rows_a_model": rows_a_model}
        line |= {way: round(rate) for way, rate in ways.items()}
        over = {
            f"over_{way}": round(ways["packed"] / ways[way], 3) for way in ways if way != "packed" and "packed" in ways
        }
        goal = UNMIXED_GOAL.get((preset, models, rows_a_model))
        lines.append(line | over | ({"goal_over_one_after_another": goal} if goal else {}))
    return lines


def show(row: dict[str, Any]) -> None:
    execution = " ".join(f"{key}={value}" for key, value in row["execution"].items())
    print(f"{row['preset']} {row['models']} x {row['rows_a_model']} rows, {row['way']}, {execution}:", end=" ")
    if "error" in row:
        print(row["error"].splitlines()[0], flush=True)
        return
    goals = " and ".join(f"{goal:,.0f}" for goal in row["goals_targets_per_second"] or ())
    memory = {key.removesuffix("_bytes"): value and round(value / 2**30, 2) for key, value in row["memory"].items()}
    parts = {part: round(seconds * 1e3, 2) for part, seconds in (row["parts_seconds"] or {}).items() if seconds}
    print(f"{row['targets_per_second'] or 0:,.0f} targets/s" + (f" (goals {goals})" if goals else ""))
    print(f"    GiB {memory}, ms {parts or 'not by part'}, first update s {max(row['first_update_seconds']):.1f}")
    sys.stdout.flush()
