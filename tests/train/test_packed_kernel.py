"""The fused update against PyTorch's operators: on a GPU as it is, elsewhere through Triton's interpreter."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from triton_kernels import sum_with_numpy, use_own_addition

from tinyllm_ray.train.mixing import mixing_matrix
from tinyllm_ray.train.packed_optimizer import Mixing, PackedAdamW

packed_kernel = pytest.importorskip("tinyllm_ray.train.packed_kernel")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((37, 4), (2, 3), (5,))


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    """Triton decides where a kernel is defined whether it is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(packed_kernel)
            sum_with_numpy(packed_kernel, patch)
        yield
    importlib.reload(packed_kernel)


def build(models: int, dtype: torch.dtype, fused: bool) -> tuple[list[nn.Parameter], PackedAdamW]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(models, *shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    weights = [nn.Parameter(weight.to(DEVICE, dtype)) for weight in drawn]
    several = [0.5**model for model in range(models)]
    optimizer = PackedAdamW(
        weights,
        learning_rate=[0.1 * one for one in several],
        betas=([1 - 0.1 * one for one in several], [1 - 0.01 * one for one in several]),
        eps=[1e-3 * one for one in several],
        weight_decay=several,
        fused=fused,
    )
    return weights, optimizer


def run(
    models: int, dtype: torch.dtype, fused: bool, scheme: str | None, topology: str = "one_peer_exponential"
) -> list[torch.Tensor]:
    """Weights and moments after a few updates; the second model stops where nothing is mixed."""
    weights, optimizer = build(models, dtype, fused)
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.5, 1, models, device=DEVICE)
    for update in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
            if scheme is None and update and models > 1:
                weight.grad[1] = float("nan")
        mixing = None
        if scheme is not None:
            matrix = torch.from_numpy(mixing_matrix(topology, models, update)).to(DEVICE, dtype)
            mixing = Mixing(scheme, matrix)  # type: ignore[arg-type]
        elif update and models > 1:
            optimizer.stop(torch.arange(models, device=DEVICE) == 1)
        optimizer.step(gradient_scale=scale, mixing=mixing)
    moments = [optimizer.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]
    return [*(weight.detach() for weight in weights), *moments]


@pytest.mark.parametrize("scheme", [None, "awc", "atc"])
@pytest.mark.parametrize("models", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_equals_the_operators_in_float64(models: int, scheme: str | None) -> None:
    found, expected = run(models, torch.float64, True, scheme), run(models, torch.float64, False, scheme)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["awc", "atc"])
def test_its_own_addition_mixes_the_same(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_addition(packed_kernel, monkeypatch)
    found, expected = run(2, torch.float64, True, scheme), run(2, torch.float64, False, scheme)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", [None, "awc", "atc"])
def test_equals_the_operators_in_float32(scheme: str | None) -> None:
    found, expected = run(5, torch.float32, True, scheme, "complete"), run(5, torch.float64, False, scheme, "complete")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_columns_beyond_one_program_are_all_updated() -> None:
    weights = [torch.full((2, 3, 1031), 1.0, device=DEVICE) for _ in range(4)]
    scales = torch.tensor([[1.0, 1.0], [0.5, 0.25], [0, 0], [0, 0], [0, 0], [1, 1], [1, 1], [0, 0]], device=DEVICE)
    packed_kernel.fused_update(*weights, scales, None, None)
    assert weights[0].unique().tolist() == [0.25, 0.5]
    assert (weights[0][0] == 0.5).all()
