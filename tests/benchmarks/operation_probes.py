"""The decoder's kernels alone on the device, norm, rotary positions and SwiGLU: against PyTorch's compiled code.

    python tests/benchmarks/operation_probes.py --out FILE
    python tests/benchmarks/operation_probes.py --probes norm --presets 20m 500m --rows 32

A case is the forward and backward pass of one operation in all layers of a preset, each on tensors of its own,
replayed as one CUDA graph, so that neither launches nor Python are in the milliseconds. The floor is what the kernels'
docstrings count, all layers, at the bandwidth given. Prints a line a variant as `kernel_probes.py` does, PyTorch's
first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kernel_probes
import torch
from kernel_probes import Call, Case, Limits, Results, as_text, compiled, measure

from tinyllm_ray.config import load
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.model.llama import rotary_tables
from tinyllm_ray.model.operations import TORCH, Operations, operations_of
from tinyllm_ray.sections import ModelConfig

TRITON = {"norm_kernel": "triton", "rotary_kernel": "triton", "activation_kernel": "triton"}


def probe_norm(model: ModelConfig, rows: int, limits: Limits) -> Iterator[Case]:
    """A layer's sum and norm once: x, what is added in bf16 and the scale, with gradients of sum and norm."""
    shape = (rows, model.context, model.width)
    for stream, moved in ((torch.float32, 12 + 16), (torch.bfloat16, 8 + 8)):

        def layer(stream: torch.dtype = stream) -> list[Any]:
            scale = torch.ones(model.width, device=kernel_probes.DEVICE, requires_grad=True)
            return [leaf(*shape, dtype=stream), leaf(*shape), scale]

        def run(operations: Operations, *given: torch.Tensor) -> Results:
            total, normed = operations.add_norm(*given, model.norm_eps)
            return total, normed.to(torch.bfloat16)  # the product that follows would cast it

        yield _case(f"norm, {stream} stream", model, rows, model.width * moved, limits, layer, run)


def probe_rotary(model: ModelConfig, rows: int, limits: Limits) -> Iterator[Case]:
    """Query, key and value out of the projection, with gradients as attention leaves them.

    The floor is the kernel's, which moves value too; PyTorch's leaves it where it is, 4 bytes less of 24.
    """
    features = model.width // model.heads
    tables = [table.to(kernel_probes.DEVICE) for table in rotary_tables(model.context, features, model.rope_theta)]

    def layer() -> list[Any]:
        return [leaf(rows, model.context, 3, model.heads, features), *tables]

    def run(operations: Operations, *given: torch.Tensor) -> Results:
        return operations.rotate(*given)

    yield _case("rotary", model, rows, model.width * (12 + 12), limits, layer, run)


def probe_swiglu(model: ModelConfig, rows: int, limits: Limits) -> Iterator[Case]:
    """The product of the activated gate and up, and the projection's gradient."""

    def layer() -> list[Any]:
        return [leaf(rows, model.context, 2 * model.ffn)]

    def run(operations: Operations, *given: torch.Tensor) -> Results:
        return (operations.swiglu(*given),)

    yield _case("swiglu", model, rows, model.ffn * (6 + 10), limits, layer, run)


PROBES: dict[str, Callable[[ModelConfig, int, Limits], Iterator[Case]]] = {
    "norm": probe_norm,
    "rotary": probe_rotary,
    "swiglu": probe_swiglu,
}


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=kernel_probes.DEVICE, dtype=dtype, requires_grad=True)


def _case(
    name: str,
    model: ModelConfig,
    rows: int,
    bytes_a_target: int,
    limits: Limits,
    layer: Callable[[], list[Any]],
    run: Callable[..., Results],
) -> Case:
    moved = model.layers * rows * model.context * bytes_a_target
    triton = operations_of(ExecutionConfig.model_validate(TRITON))
    variants = {
        "torch": lambda: graphed(_all_layers(model.layers, layer, compiled(partial(run, TORCH)))),
        "triton": lambda: graphed(_all_layers(model.layers, layer, partial(run, triton))),
    }
    return Case(f"{name}, {model.layers} x {rows} x {model.context}", limits.seconds(moved), variants)


def _all_layers(layers: int, layer: Callable[[], list[Any]], function: Callable[..., Results]) -> Call:
    """Forward and backward of every layer; returns the first one's outputs and gradients.

    Every variant is given the same numbers.
    """
    torch.manual_seed(0)
    operands = [layer() for _ in range(layers)]
    with torch.no_grad(), torch.autocast(kernel_probes.DEVICE, torch.bfloat16):
        upstream = [_gradient_of(output) for output in function(*operands[0])]

    def once() -> Results:
        found: list[Results] = []
        for given in operands:
            with torch.autocast(kernel_probes.DEVICE, torch.bfloat16):
                outputs = function(*given)
            leaves = [one for one in given if one.requires_grad]
            gradients = torch.autograd.grad(outputs, leaves, upstream)
            found.append((*(output.detach() for output in outputs), *gradients))
        return found[0]

    return once


def _gradient_of(output: torch.Tensor) -> torch.Tensor:
    """Random, with heads side by side in memory where there are any, as attention returns it."""
    drawn = torch.randn(output.shape, device=output.device, dtype=output.dtype)
    return drawn.transpose(1, 2).contiguous().transpose(1, 2) if drawn.ndim == 4 else drawn


def graphed(once: Call) -> Call:
    """The call captured and replayed; it compiles before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = once()

    def call() -> Results:
        graph.replay()
        return results

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", nargs="*", choices=PROBES, default=list(PROBES))
    parser.add_argument("--presets", nargs="*", default=["20m"])
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 4])
    parser.add_argument("--milliseconds", type=int, default=200, help="of calls that are timed a variant")
    parser.add_argument("--bandwidth", type=float, default=Limits.bytes_per_second)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("operation_probes times GPU kernels, but there is no CUDA device here")
    lines = []
    for probe in options.probes:
        print(f"{probe}: {str(PROBES[probe].__doc__).splitlines()[0]}")
        for preset in options.presets:
            for rows in options.rows:
                for case in PROBES[probe](load(preset).model, rows, Limits(options.bandwidth)):
                    for line in measure(case, options.milliseconds):
                        print(as_text(line), flush=True)
                        lines.append({"probe": probe, "preset": preset, "rows": rows} | line)
    if options.out:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "probes": lines,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
