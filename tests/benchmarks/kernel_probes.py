"""Each Triton kernel alone on the device: against PyTorch's compiled code and against what memory and products allow.

    python tests/benchmarks/kernel_probes.py --out FILE
    python tests/benchmarks/kernel_probes.py --probes loss_rows --rows 32768

Prints a line a variant: median milliseconds of a call (20th to 80th percentile; L2 is emptied between calls) beside the
floor of its work, the ratio to PyTorch's, how far its results are from those (norm of the difference over the norm),
and the memory that it takes beside its operands. A probe is a function in `PROBES` that yields cases, at a number of
rows, and of all widths where these matter; the first variant of a case is PyTorch's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

DEVICE = "cuda"
WORDS = 32_000

Results = tuple[torch.Tensor, ...]
Call = Callable[[], Results]


@dataclass(frozen=True)
class Case:
    """The same work done in several ways."""

    name: str
    floor_seconds: float
    variants: dict[str, Callable[[], Call]] = field(default_factory=dict)
    """By name, what prepares a call: what it allocates is freed before the next is prepared. The first is PyTorch's."""


@dataclass(frozen=True)
class Limits:
    """What the device reaches: defaults as measured on one H200."""

    bytes_per_second: float = 4.3e12
    operations_per_second: float = 790e12

    def seconds(self, moved: float, operations: float = 0.0) -> float:
        """Of one kernel that moves so many bytes and does so many bf16 operations meanwhile."""
        return max(moved / self.bytes_per_second, operations / self.operations_per_second)


def loss(rows: int, widths: Sequence[int], limits: Limits) -> Iterator[Case]:
    """Projection, cross-entropy and both gradients of bf16 hidden states and weights."""
    for features in widths:
        yield _loss(rows, features, limits)


def _loss(rows: int, features: int, limits: Limits) -> Case:
    from tinyllm_ray.model.kernels.cross_entropy import linear_cross_entropy

    hidden = draw(rows, features).requires_grad_()
    weight = draw(WORDS, features).mul_(0.1).requires_grad_()
    targets = torch.randint(WORDS, (rows,), device=DEVICE)

    def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)

    def with_gradients(function: Callable[..., torch.Tensor]) -> Results:
        found = function(hidden, weight, targets)
        return found.detach(), *torch.autograd.grad(found, (hidden, weight))

    def variant(**sizes: int) -> Callable[[], Call]:
        return lambda: partial(with_gradients, partial(linear_cross_entropy, **sizes))

    product = limits.seconds(2 * (rows * WORDS + (rows + WORDS) * features), 2.0 * rows * WORDS * features)
    case = Case(f"{rows} x {features}", 3 * product + limits.seconds(4 * rows * WORDS))
    case.variants["torch"] = lambda: partial(with_gradients, compiled(plain))
    case.variants["triton"] = variant()
    for chunk in (2048, 4096, 8192, 16_384, 32_768):
        if chunk <= rows:
            case.variants[f"triton, chunks of {chunk}"] = variant(chunk_rows=chunk)
    for block in (2048, 4096, 16_384, 32_768):
        case.variants[f"triton, blocks of {block}"] = variant(row_block=block)
    return case


def loss_rows(rows: int, widths: Sequence[int], limits: Limits) -> Iterator[Case]:
    """Cross-entropy of bf16 logits and the gradient over them: one kernel, by the block and the warps of a program."""
    from tinyllm_ray.model.kernels.cross_entropy import tinyllm_cross_entropy
    from tinyllm_ray.model.losses import IGNORED

    logits = draw(rows, WORDS)
    targets = torch.randint(WORDS, (rows,), device=DEVICE)

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float(), targets, reduction="sum")

    def torchs() -> Call:
        function, leaf = compiled(plain), logits.clone().requires_grad_()

        def call() -> Results:
            found = function(leaf, targets)
            return found.detach(), *torch.autograd.grad(found, leaf)

        return call

    def variant(block: int, warps: int) -> Call:
        own = logits.clone()  # the gradient replaces it: only the first call's results are a loss's
        losses = torch.empty(rows, device=DEVICE)

        def call() -> Results:
            tinyllm_cross_entropy[(rows,)](
                own, targets, losses, 1, WORDS=WORDS, BLOCK=block, GRADIENT=True, IGNORED=IGNORED, num_warps=warps
            )
            return losses, own

        return lambda: summed(call())

    def summed(results: Results) -> Results:
        return results[0].sum(), results[1]

    case = Case(f"{rows} x {WORDS}", limits.seconds(4 * rows * WORDS), {"torch": torchs})
    for block, all_warps in ROW_VARIANTS.items():
        for warps in all_warps:
            case.variants[f"triton, blocks of {block}, {warps} warps"] = partial(variant, block, warps)
    yield case


ROW_VARIANTS = {1024: (2, 4), 2048: (4, 8), 4096: (4, 8, 16), 8192: (8, 16), 16_384: (16, 32), 32_768: (16, 32)}
"""Warps by block; a block of 32,768 holds the whole row, which is then read once."""

PROBES: dict[str, Callable[[int, Sequence[int], Limits], Iterator[Case]]] = {"loss": loss, "loss_rows": loss_rows}
ROWS = (32_768, 4096)
WIDTHS = (320, 512, 640)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def measure(case: Case, milliseconds: int) -> Iterator[dict[str, Any]]:
    from triton.testing import do_bench

    expected: Results = ()
    first_milliseconds = 0.0
    for name, prepare in case.variants.items():
        call = prepare()
        results = tuple(result.clone() for result in call())
        expected = expected or results
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        taken = torch.cuda.max_memory_allocated() - before
        median, low, high = do_bench(call, warmup=milliseconds // 4, rep=milliseconds, quantiles=(0.5, 0.2, 0.8))
        first_milliseconds = first_milliseconds or median
        yield {
            "case": case.name,
            "variant": name,
            "milliseconds": median,
            "from_milliseconds": low,
            "to_milliseconds": high,
            "floor_milliseconds": case.floor_seconds * 1e3,
            "times_floor": median / (case.floor_seconds * 1e3),
            "times_torch": median / first_milliseconds,
            "distances": [distance(*pair) for pair in zip(results, expected, strict=True)],
            "taken_bytes": taken,
        }
        del call, results


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """By parts, so that the differences of whole logits are never all there."""
    parts = zip(one.reshape(-1).split(1 << 26), other.reshape(-1).split(1 << 26), strict=True)
    squares = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in parts]
    apart, whole = (torch.stack(column).sum().sqrt() for column in zip(*squares, strict=True))
    return float(apart / whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probes", nargs="*", choices=PROBES, default=list(PROBES))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--milliseconds", type=int, default=200, help="of calls that are timed a variant")
    parser.add_argument("--bandwidth", type=float, default=Limits.bytes_per_second)
    parser.add_argument("--operations", type=float, default=Limits.operations_per_second)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_probes times GPU kernels, but there is no CUDA device here")
    torch.manual_seed(0)
    lines = []
    limits = Limits(options.bandwidth, options.operations)
    for probe in options.probes:
        print(f"{probe}: {str(PROBES[probe].__doc__).strip()}")
        for rows in options.rows:
            for case in PROBES[probe](rows, options.widths, limits):
                for line in measure(case, options.milliseconds):
                    print(as_text(line), flush=True)
                    lines.append({"probe": probe} | line)
    if options.out:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "probes": lines,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def as_text(line: dict[str, Any]) -> str:
    apart = max(line["distances"])
    return (
        f"{line['case']:>15}  {line['variant']:<36}{line['milliseconds']:9.3f} ms "
        f"({line['from_milliseconds']:.3f} to {line['to_milliseconds']:.3f})  "
        f"{line['times_floor']:5.2f} x floor {line['floor_milliseconds']:.3f}  {line['times_torch']:5.2f} x torch  "
        f"{apart:.1e} apart  {line['taken_bytes'] / 1e6:8.1f} MB"
    )


if __name__ == "__main__":
    main()
