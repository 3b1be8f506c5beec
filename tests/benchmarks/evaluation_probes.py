"""The parts of a validation loss, each alone on the device: hidden states by rows, the head by formula and chunk.

    python tests/benchmarks/evaluation_probes.py --preset 20m --out FILE
    python tests/benchmarks/evaluation_probes.py --preset nano --rows 4 --chunks 256 --device cpu   # eager alone

Prints a JSON line a probe: nanoseconds a target, the first call's seconds (compilation), peak memory, and of the
head the difference of its loss from that of the same logits in float64. The embedding is drawn at five times its usual
spread, so that the softmax is less flat than a fresh model's.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tinyllm_ray.config import load
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.losses import IGNORED, summed_cross_entropy

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="20m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--chunks", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--formulas", nargs="*", default=["cross_entropy", "grouped-256", "grouped-1000", "sum_exp"])
    parser.add_argument("--mode", help="torch.compile's; everything is eager on a CPU")
    parser.add_argument("--eager", action="store_true", help="the first size of each eagerly as well")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    with torch.no_grad():
        for line in probe(options):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.out:
        name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
        result = {"command": " ".join(["python", *sys.argv]), "machine": name, "probes": lines}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def probe(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device(options.device)
    config = load(options.preset).model
    model = initialize(config, seed=0).to(device)
    model.embedding.weight.mul_(5)
    compiled = {"mode": options.mode, "dynamic": False, "fullgraph": True}
    keep = {"device": str(device), "torch": torch.__version__, "mode": options.mode or "default"}
    executions = [("eager", 1)] if device.type == "cpu" else [("eager", 1)] * options.eager + [("compiled", None)]
    for execution, count in executions:
        for rows in options.rows[:count]:
            tokens = torch.randint(config.vocab_size, (rows, config.context), device=device)
            torch._dynamo.reset()
            function = model.hidden if execution == "eager" else torch.compile(model.hidden, **compiled)
            seen = clock(lambda function=function, tokens=tokens: function(tokens), tokens.numel(), device)
            yield {"part": "hidden", "rows": rows, "execution": execution} | seen | keep
        for formula in options.formulas:
            for chunk in options.chunks[:count]:
                yield head(model, formula, chunk, execution, compiled, device) | keep


def head(
    model: Llama, formula: str, chunk: int, execution: str, compiled: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    hidden = torch.randn(chunk, model.config.width, device=device)
    targets = torch.randint(model.config.vocab_size, (chunk,), device=device)
    plain = formulas(model, formula)
    function = plain if execution == "eager" else torch.compile(plain, **compiled)
    seen = clock(lambda: function(hidden, targets), chunk, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = function(hidden, targets).double() / chunk
        logits = torch.cat([model.logits(part) for part in hidden.split(1024)])
    exact = sum(
        functional.cross_entropy(part.double(), wanted, reduction="sum")
        for part, wanted in zip(logits.split(1024), targets.split(1024), strict=True)
    )
    nats = {"loss": loss.item(), "from_float64": (loss - exact / chunk).item()}
    return {"part": "head", "formula": formula, "chunk": chunk, "execution": execution} | seen | nats


def formulas(model: Llama, name: str) -> Head:
    """The summed loss, written in different ways."""
    if name == "cross_entropy":
        return lambda hidden, targets: summed_cross_entropy(model.logits(hidden), targets)
    kind, _, size = name.partition("-")

    def grouped(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = model.logits(hidden).float()
        if kind == "grouped":  # two levels, of which the first keeps a group in registers
            level = wide.unflatten(1, (-1, int(size))).logsumexp(2).logsumexp(1)
        elif kind == "sum_exp":  # no maximum: overflows where a logit passes 88
            level = wide.exp().sum(1).log()
        else:
            level = wide.logsumexp(1)
        picked = wide.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(targets == IGNORED, 0.0, level - picked).sum()

    return grouped


def clock(call: Callable[[], torch.Tensor], targets: int, device: torch.device) -> dict[str, Any]:
    def run(times: int) -> float:
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for _ in range(times):
                call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    first = run(1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = max(1, int(0.4 / max(run(1), 1e-4)))
    per_target = [run(times) / times / targets * 1e9 for _ in range(3)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"nanoseconds_a_target": sorted(per_target)[1], "first_seconds": first, "peak_allocated_bytes": peak}


if __name__ == "__main__":
    main()
