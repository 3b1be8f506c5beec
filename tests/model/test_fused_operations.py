"""Kernels inside products in the decoder: against the decoder with PyTorch's own, and where they do not fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_kernels import DEVICE, runnable

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.operations import TORCH, Operations, operations_of
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.sections import ModelConfig

TRITON = {"rotary_kernel": "triton", "activation_kernel": "triton"}
FITTING = ModelConfig(layers=2, width=32, heads=2, ffn=64, context=9, vocab_size=31, init_std=0.2)
ODD = ModelConfig(layers=1, width=12, heads=2, ffn=10, context=9, vocab_size=31, init_std=0.2)


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    pytest.importorskip("triton")
    with runnable("rotary", "activation", "feed_forward", "rotated_projection"):
        yield


def chosen(**execution: Any) -> Operations:
    return operations_of(ExecutionConfig.model_validate(execution))


def build(shape: ModelConfig, operations: Operations, dtype: torch.dtype) -> Llama:
    return initialize(shape, 0, operations).to(DEVICE, dtype)


def loss_and_gradients(model: Llama | PackedLlama) -> list[torch.Tensor]:
    size = (3, 8) if isinstance(model, Llama) else (2, 3, 8)
    batch = torch.randint(31, size, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = model.loss(batch[..., :-1], batch[..., 1:])
    return [found.detach(), *torch.autograd.grad(found.sum(), list(model.parameters()))]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of the gradients, over their norm; the losses agree to three thousandths."""
    assert found[0].item() == pytest.approx(exact[0].item(), rel=3e-3)
    pairs = list(zip(found[1:], exact[1:], strict=True))
    error = sum(float((one.double() - other).square().sum()) for one, other in pairs)
    return (error / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_has_the_losses_and_gradients_of_the_default(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    """In float16: Triton's interpreter multiplies bfloat16 by its bits."""
    from tinyllm_ray.model.kernels import feed_forward, rotated_projection

    ran: list[str] = []
    for module, name in ((feed_forward, "feed_forward"), (rotated_projection, "rotated_projection")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: ran.append(name) or own(*given))
    found = loss_and_gradients(build(FITTING, chosen(**TRITON, recompute_activations=recompute), torch.float16))
    assert ran == ["rotated_projection", "feed_forward"] * FITTING.layers * (2 if recompute else 1)
    assert distance(found, loss_and_gradients(build(FITTING, TORCH, torch.float64))) < 5e-3


def beside() -> Operations:
    """Kernels between products alone."""
    return replace(chosen(**TRITON), fused_rotation=None, fused_feed_forward=None)


def test_where_the_shape_does_not_fit_kernels_beside_the_products_take_their_place_bit_by_bit() -> None:
    ways = (chosen(**TRITON), beside())
    found, expected = (loss_and_gradients(build(ODD, way, torch.float16)) for way in ways)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_so_do_they_in_a_pack() -> None:
    found, expected = (
        loss_and_gradients(initialize_packed(FITTING, range(2), way).to(DEVICE, torch.float16))
        for way in (chosen(**TRITON), beside())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
