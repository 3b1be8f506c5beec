"""Validation loss from tokens on disk: targets/s, memory, compilation, and how far from the eager loss it is.

    python tests/benchmarks/evaluation.py --preset 20m --targets 197411295 --out FILE
    python tests/benchmarks/evaluation.py --preset nano --targets 20000 --reference-targets 20000   # on two CPU cores

A model is trained for a few updates and evaluated on the default corpus's training split, read again and again, in
processes of their own: `cold` compiles with an empty compile cache and evaluates --targets, `warm` compiles with the
cache that `cold` left, `eager` compiles nothing; both evaluate --fewer-targets. A CPU does `eager` alone unless
--executions says otherwise. Differences are to `evaluate.evaluate`, eager with all logits of a row in float32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="20m")
    parser.add_argument("--targets", type=int, default=197_411_295, help="default: those of C4's validation split")
    parser.add_argument("--fewer-targets", type=int, help="default: a tenth")
    parser.add_argument("--reference-targets", type=int, default=2_000_000)
    parser.add_argument("--updates", type=int, default=100, help="of training, before the evaluation")
    parser.add_argument("--executions", nargs="*", choices=("cold", "warm", "eager"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, like everywhere")
    parser.add_argument("--out", type=Path, help="file for the result (default: printed only)")
    parser.add_argument("--measure", choices=("cold", "warm", "eager"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv])} | machine()
    executions = options.executions or (["cold", "warm", "eager"] if result["gpu"] else ["eager"])
    with tempfile.TemporaryDirectory() as folder:
        folders = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for execution in executions:
            command = [sys.executable, *sys.argv, "--measure", execution]
            found = subprocess.run(command, env=os.environ | folders, stdout=subprocess.PIPE, text=True, check=True)
            result[execution] = json.loads(found.stdout.splitlines()[-1])
            print(execution, json.dumps(result[execution], indent=1), flush=True)
            if options.out:  # after each, as a later one may be cut short
                options.out.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    import torch

    from tinyllm_ray.measure.environment import collect_environment, source_identity

    found = collect_environment()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    kept = {name: found[name] for name in ("python", "versions", "cuda", "cudnn", "driver", "cpu")}
    return {"gpu": gpu, "environment": kept, "source_identity": source_identity().sha256}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One execution, in this process."""
    import torch

    from tinyllm_ray.config import load
    from tinyllm_ray.data.cache import open_cache
    from tinyllm_ray.data.loader import subset_batches
    from tinyllm_ray.data.prepare import default_cache
    from tinyllm_ray.train.evaluate import Evaluator, evaluate
    from tinyllm_ray.train.trainer import Trainer

    update = "eager" if options.measure == "eager" else "compiled"
    config = load(options.preset, [f"execution.update={update}", f"evaluation_execution.update={update}", *options.set])
    cache, context = open_cache(default_cache()), config.model.context
    targets = options.targets if options.measure == "cold" else options.fewer_targets or options.targets // 10
    with Trainer(config, cache) as trainer:

        def seconds(call: Callable[[], Any]) -> float:
            trainer.synchronize()
            begin = time.perf_counter()
            call()
            trainer.synchronize()
            return time.perf_counter() - begin

        first_update = seconds(trainer.step)
        an_update = seconds(lambda: [trainer.step() for _ in range(options.updates)]) / max(1, options.updates)
        evaluator = Evaluator(trainer.model, config, trainer.device)
        held = reset_peak(trainer.device)
        stream = repeated(cache, context, evaluator.rows, "train")
        a_batch = evaluator.rows * context
        first = seconds(lambda: evaluator.evaluate(cut(stream, a_batch)))
        first_again = seconds(lambda: evaluator.evaluate(cut(stream, a_batch)))
        blocks = config.evaluation.subset_blocks
        subset = list(subset_batches(cache, context, evaluator.rows, blocks, 12345, "train"))
        epoch = seconds(lambda: evaluator.evaluate(subset))
        found: list[tuple[float, int]] = []
        whole = seconds(lambda: found.append(evaluator.evaluate(cut(stream, targets))))
        peak = torch.cuda.max_memory_allocated() - held if trainer.device.type == "cuda" else None
        few = min(options.reference_targets, cache.tokens("train") // a_batch * a_batch)
        ours, counted = evaluator.evaluate(cut(repeated(cache, context, evaluator.rows, "train"), few))
        same = cut(repeated(cache, context, min(8, evaluator.rows), "train"), few)
        reference, expected = evaluate(trainer.model, same, config.execution.sdpa_backend)
        assert counted == expected
        after = seconds(lambda: [trainer.step() for _ in range(options.updates)]) / max(1, options.updates)
        return {
            "parameters": config.model.parameters,
            "rows": evaluator.rows,
            "chunk": evaluator.chunk,
            "targets": found[0][1],
            "seconds": whole,
            "targets_per_second": found[0][1] / whole,
            "loss": found[0][0],
            "reference_targets": counted,
            "reference_loss": reference,
            "difference_nats": ours - reference,
            "peak_bytes_beside_training": peak,
            "first_batch_seconds": first,
            "later_batch_seconds": first_again,
            "epoch_evaluation_rows": sum(map(len, subset)),
            "epoch_evaluation_seconds": epoch,
            "first_update_seconds": first_update,
            "update_seconds": an_update,
            "update_seconds_after": after,
        }


def reset_peak(device: Any) -> int:
    """Bytes allocated now, from which the peak is counted."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def repeated(cache: Any, context: int, rows: int, split: str) -> Iterator[Any]:
    """The split's whole batches as `validation_batches` has them, over and over."""
    from tinyllm_ray.data.loader import validation_batches

    while True:
        whole = (
            batch for batch in validation_batches(cache, context, rows, split) if batch.size == rows * (context + 1)
        )
        first = next(whole, None)
        if first is None:
            raise SystemExit(f"{split} of {cache.folder} has no {rows} rows of {context}")
        yield first
        yield from whole


def cut(batches: Iterator[Any], targets: int) -> Iterator[Any]:
    """The first batches, up to exactly so many targets; the last row may come alone, shorter than the others."""
    while targets:
        rows = next(batches)
        width = rows.shape[1] - 1
        whole, rest = min(len(rows), targets // width), targets % width
        if whole:
            yield rows[:whole]
        if whole < len(rows) and rest:
            yield rows[whole : whole + 1, : rest + 1]
            return
        targets -= whole * width


if __name__ == "__main__":
    main()
