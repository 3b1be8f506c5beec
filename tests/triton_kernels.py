"""Running Triton kernels in tests: on a GPU as they are, elsewhere through Triton's interpreter."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

tl = pytest.importorskip("triton.language")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def runnable(*modules: str) -> Iterator[None]:
    """Inside, the kernels of `tinyllm_ray.model.kernels`' modules run here.

    Triton decides where a kernel is defined whether it is compiled, so that the modules are loaded once more.
    """
    loaded = [importlib.import_module(f"tinyllm_ray.model.kernels.{name}") for name in modules]
    if DEVICE.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in loaded:
            importlib.reload(module)
            sum_with_numpy(module, patch)
        yield
    for module in loaded:
        importlib.reload(module)


def sum_with_numpy(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """The interpreter calls a reduction's function for each element, in Python; Triton's own addition is NumPy's to it.

    The module's own, if it has one, is then `module._own_add`.
    """
    if hasattr(module, "_add"):
        patch.setattr(module, "_own_add", module._add, raising=False)
        patch.setattr(module, "_add", tl.standard._sum_combine)


def use_own_addition(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """As a GPU does."""
    patch.setattr(module, "_add", getattr(module, "_own_add", module._add))


def gradients(outputs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor], seed: int = 5) -> tuple[torch.Tensor, ...]:
    """Of a weighted sum of the outputs, whose weights depend on the seed and their place alone."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    upstream = [weight.to(output) for weight, output in zip(weights, outputs, strict=True)]
    return torch.autograd.grad(outputs, inputs, upstream)


def assert_replays_to_the_same_bits(once: Callable[[], Any]) -> None:
    """On a GPU: what `once` returns is what a CUDA graph of it makes.

    It returns tensors that are detached: no autograd graph of the first call may hold a leaf's accumulator, which
    belongs to that call's stream.
    """
    expected = once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = once()
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
