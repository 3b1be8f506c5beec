"""Whether two executions of one recipe learn the same: their validation curves beside those of one execution twice.

    python tests/benchmarks/matched_training.py --preset nano --set training.max_updates=300 --repeats 2 --out band.json
    python tests/benchmarks/matched_training.py --preset 20m-32k --set training.token_budget=100000768 \\
        --set training.epochs=100 --execution update=compiled --other update=eager --out matched.json       # one H200

Trains with the real command, each run in a process of its own: the first execution --repeats times (the A/A runs), the
other once. The A/A band at a point is the largest difference between A/A runs at any point so far (chaos only grows),
and at least --floor nats: on a CPU equal executions give equal bits, and 0.005 nats is what a recipe study resolves.
The other execution is within the band where its distance from the nearest A/A run is no more than the band. Points
within the first --passes passes over the tokens decide; later ones are reported.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tinyllm_ray.config import load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import default_cache


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="recipe settings")
    parser.add_argument("--execution", nargs="*", default=["update=eager"], metavar="KEY=VALUE")
    parser.add_argument("--other", nargs="*", default=["update=compiled"], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=2, help="A/A runs")
    parser.add_argument("--floor", type=float, default=0.005, help="nats")
    parser.add_argument("--passes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="keeps the runs' folders here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    same = [train(options, options.execution, folder / f"a{number}") for number in range(options.repeats)]
    other = train(options, options.other, folder / "b")
    report = compare(same, other, options)
    report["command"] = [Path(sys.executable).name, *sys.argv]
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def train(options, execution, out):
    """One run of the real command; what it left."""
    settings = [*options.set, *(f"execution.{setting}" for setting in execution)]
    command = [sys.executable, "-m", "tinyllm_ray.train", "--config", options.preset, "--out", str(out)]
    subprocess.run([*command, *(word for setting in settings for word in ("--set", setting))], check=True)
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    return {
        "execution": execution,
        "config": load(out / "config.yaml"),
        "result": json.loads((out / "result.json").read_text()),
        "environment": json.loads((out / "environment.json").read_text()),
        "curve": {line["step"]: line["loss"] for line in lines if line["split"] == "subset"},
    }


def compare(same, other, options):
    """Everything the report says; refuses runs that differ by more than their execution."""
    runs = [*same, other]
    identities = {run["config"].recipe_identity for run in runs}
    assert len(identities) == 1, "the recipes differ"
    first = same[0]["config"]
    cache = open_cache(first.data.cache or default_cache())
    rows_a_pass = (cache.tokens("train") - 1) // first.model.context
    points, band = [], options.floor
    for step in same[0]["curve"]:
        losses = [run["curve"][step] for run in same]
        band = max(band, *(abs(a - b) for a, b in itertools.combinations(losses, 2)))
        distance = min(abs(other["curve"][step] - loss) for loss in losses)
        passes = step * first.rows_per_update / rows_a_pass
        points.append(
            {
                "step": step,
                "passes": passes,
                "decides": passes <= options.passes,
                "same": losses,
                "other": other["curve"][step],
                "band": band,
                "distance": distance,
                "within": distance <= band,
            }
        )
    return {
        "recipe_identity": identities.pop(),
        "cache_identity": cache.identity,
        "differ_in": differing(first.model_dump(), other["config"].model_dump()),
        "within": all(point["within"] for point in points if point["decides"]),
        "deciding_points": sum(point["decides"] for point in points),
        "points": points,
        "runs": [summary(run) for run in runs],
        "environment": {key: same[0]["environment"][key] for key in ("python", "versions", "cuda", "cudnn", "driver")},
    }


def differing(one, other, path=""):
    """Dotted names of the settings in which two configurations differ."""
    if isinstance(one, dict):
        return [name for key in one for name in differing(one[key], other[key], f"{path}.{key}".lstrip("."))]
    return [] if one == other else [path]


def summary(run):
    result = run["result"]
    keys = (
        "status", "step", "tokens", "loss", "validation", "training_seconds", "training_elapsed_seconds",
        "training_tokens_per_second", "elapsed_tokens_per_second", "evaluation_seconds", "device_name",
    )  # fmt: skip
    return {"execution": run["execution"], **{key: result[key] for key in keys}}


def show(report):
    print(f"recipe {report['recipe_identity'][:12]}, executions differ in {', '.join(report['differ_in'])}")
    for run in report["runs"]:
        print(
            f"{' '.join(run['execution']):40} validation {run['validation']['loss']:.4f}, "
            f"{run['training_tokens_per_second']:,.0f} targets/s, {run['training_elapsed_seconds']:.1f} s"
        )
    print("  step  passes      same  other   distance  band")
    for point in report["points"]:
        mark = "" if point["within"] else " outside" + ("" if point["decides"] else ", after the passes that decide")
        print(
            f"{point['step']:6} {point['passes']:7.2f} {point['same'][0]:9.4f} {point['other']:8.4f} "
            f"{point['distance']:8.4f} {point['band']:8.4f}{mark}"
        )
    print(f"within the band at all {report['deciding_points']} deciding points: {report['within']}")


if __name__ == "__main__":
    main()
