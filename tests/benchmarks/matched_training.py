"""Whether two executions of one recipe learn the same: their validation curves beside those of one execution twice.

    python tests/benchmarks/matched_training.py --preset nano --set training.max_updates=256 --rounded 3 --out band.json
    python tests/benchmarks/matched_training.py --preset 20m-32k --set training.token_budget=100000768 \\
        --set training.epochs=100 --execution update=compiled --other update=eager --out matched.json       # one H200

Trains with the real command, each run in a process of its own: the first execution --repeats times (the A/A runs), the
other once. On a CPU equal executions give equal bits, while any other one rounds differently and training amplifies
that; there, --rounded runs of the first execution begin from weights moved by a rounding (each by one part in 2^23, up
or down), and count among the A/A runs. The band at a point is the largest difference between A/A runs at any point so
far (chaos only grows), and at least --floor nats, which is what a recipe study resolves. The other execution is within
the band where its distance from the nearest A/A run is no more than the band. Points within the first --passes passes
over the tokens decide; later ones are reported.
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
    parser.add_argument("--rounded", type=int, default=0, help="A/A runs from weights moved by a rounding")
    parser.add_argument("--floor", type=float, default=0.005, help="nats")
    parser.add_argument("--passes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="keeps the runs' folders here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    same = [train(options, options.execution, folder / f"a{number}") for number in range(options.repeats)]
    same += [train(options, options.execution, folder / f"r{seed}", seed) for seed in range(1, options.rounded + 1)]
    other = train(options, options.other, folder / "b")
    report = compare(same, other, options)
    report["command"] = [Path(sys.executable).name, *sys.argv]
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def train_rounded(seed, arguments):
    """The real command on weights that are moved by a rounding; its exit status."""
    import torch

    from tinyllm_ray.train import trainer
    from tinyllm_ray.train.__main__ import main as train_command

    initialize = trainer.initialize

    def initialize_rounded(*settings):
        model = initialize(*settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + torch.randint(0, 2, weight.shape, generator=generator).mul(2).sub(1) * 2.0**-23)
        return model

    trainer.initialize = initialize_rounded
    return train_command(arguments)


def train(options, execution, out, rounded=0):
    """One run of the real command; what it left."""
    settings = [*options.set, *(f"execution.{setting}" for setting in execution)]
    program = [__file__, "--train-rounded", str(rounded)] if rounded else ["-m", "tinyllm_ray.train"]
    command = [sys.executable, *program, "--config", options.preset, "--out", str(out)]
    subprocess.run([*command, *(word for setting in settings for word in ("--set", setting))], check=True)
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    return {
        "execution": [*execution, *(["from rounded weights"] if rounded else [])],
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
    print("  step  passes     first    other distance     band")
    for point in report["points"]:
        mark = "" if point["within"] else " outside" + ("" if point["decides"] else ", after the passes that decide")
        print(
            f"{point['step']:6} {point['passes']:7.2f} {point['same'][0]:9.4f} {point['other']:8.4f} "
            f"{point['distance']:8.4f} {point['band']:8.4f}{mark}"
        )
    print(f"within the band at all {report['deciding_points']} deciding points: {report['within']}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train-rounded"]:
        sys.exit(train_rounded(int(sys.argv[2]), sys.argv[3:]))
    main()
