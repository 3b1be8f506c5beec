"""The optimizer's part of an update alone, on a GPU: the flat kernels against PyTorch's clipping and fused AdamW.

    python tests/benchmarks/optimizer_probes.py --out FILE
    python tests/benchmarks/optimizer_probes.py --presets 20m --warps 4 8 16

Prints a JSON line a probe: milliseconds a call, bytes it has to move, GB/s, and the floor that those bytes set at
`--bandwidth`. Calls are captured in a CUDA graph and replayed, so that the host is in none of it: what one call costs
is what it costs inside a captured update. `all` is an update's every optimizer kernel: of the flat one collect, settle
and update, of PyTorch's the norm, clipping, AdamW and the cast of the matrices that autocast makes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tinyllm_ray.config import load
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.sections import ModelConfig, OptimizerConfig
from tinyllm_ray.train import flat_kernel
from tinyllm_ray.train.flat_buffers import FlatBuffers
from tinyllm_ray.train.flat_optimizer import FlatAdamW
from tinyllm_ray.train.optimizer import build_optimizer, clip_gradients, set_learning_rate

CALLS, REPLAYS = 20, 9

Probe = tuple[str, Callable[[], Any], float]
"""Name, call and bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=["20m", "90m"])
    parser.add_argument("--warps", type=int, nargs="*", default=[8], help="warps of a flat kernel's program")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="of the device's memory, TB/s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("optimizer_probes.py: times a GPU's kernels, and there is no GPU")
    lines = []
    for preset in options.presets:
        for line in probe_all(preset, options.warps, options.bandwidth * 1e12):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.out:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": flat_kernel.triton.__version__,
            "probes": lines,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def probe_all(preset: str, warps: list[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    config = load(preset)

    def lines(probes: Iterator[Probe], kind: str, **keep: Any) -> Iterator[dict[str, Any]]:
        for name, call, moved in probes:
            milliseconds = clock(call)
            yield {
                "preset": preset,
                "optimizer": kind,
                "probe": name,
                "milliseconds": milliseconds,
                "bytes": moved,
                "gb_per_second": moved / milliseconds / 1e6,
                "floor_milliseconds": moved / bandwidth * 1e3,
            } | keep

    yield from lines(torch_probes(config.model, config.optimizer), "torch")
    for number in warps:
        flat_kernel._WARPS = number
        for micro_batches in (1, 8):
            probes = flat_probes(config.model, config.optimizer, micro_batches)
            yield from lines(probes, "flat", micro_batches=micro_batches, warps=number)
        torch.cuda.empty_cache()


def torch_probes(model_config: ModelConfig, config: OptimizerConfig) -> Iterator[Probe]:
    """Float32 weights and gradients, as autograd leaves them."""
    device = torch.device("cuda")
    model = initialize(model_config, 0).to(device)
    optimizer = build_optimizer(model, config, device, captured=True)
    set_learning_rate(optimizer, 1e-3)
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    matrices = [weight.detach() for weight in weights if weight.ndim > 1]
    shadows = [weight.to(torch.bfloat16) for weight in matrices]
    size, of_matrices = (float(sum(one.numel() for one in group)) for group in (weights, matrices))

    def clip() -> None:
        clip_gradients(weights, 1.0)

    def cast() -> None:
        for shadow, weight in zip(shadows, matrices, strict=True):
            shadow.copy_(weight)

    def everything() -> None:
        clip()
        optimizer.step()
        cast()

    yield "norm_and_clip", clip, 12 * size
    yield "adamw", optimizer.step, 28 * size
    yield "casts", cast, 6 * of_matrices
    yield "all", everything, 40 * size + 6 * of_matrices


def flat_probes(model_config: ModelConfig, config: OptimizerConfig, micro_batches: int) -> Iterator[Probe]:
    """Bf16 gradients of one micro-batch, or of eight that are summed in float32."""
    model = initialize(model_config, 0).to("cuda")
    buffers = FlatBuffers(model, torch.bfloat16, micro_batches)
    optimizer = FlatAdamW(buffers, config, micro_batches)
    set_learning_rate(optimizer, 1e-3)
    gradients = [torch.randn_like(weight) for weight in buffers.twin_weights]
    loss = torch.ones((), device="cuda")
    size, of_matrices = float(len(buffers.masters)), float(len(buffers.shadows))
    kept = 2 if micro_batches == 1 else 4

    def first() -> None:
        optimizer.collect(loss, gradients, first=True)

    def further() -> None:
        optimizer.collect(loss, gradients, first=False)

    def everything() -> None:
        first()
        for _ in range(micro_batches - 1):
            further()
        optimizer.settle()
        optimizer.step()

    collected, added, updated = (2 + kept) * of_matrices, 10 * of_matrices, 24 * size + (2 + kept) * of_matrices
    yield "collect", first, collected
    if micro_batches > 1:
        yield "collect_further", further, added
    yield "settle", optimizer.settle, 8 * size / flat_kernel.BLOCK
    yield "update", optimizer.step, updated
    yield "all", everything, collected + (micro_batches - 1) * added + updated


def clock(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, median over replays of a graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(found)


if __name__ == "__main__":
    main()
