"""AdamW and clipping of N models against PyTorch's of one, model by model."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tinyllm_ray.sections import OptimizerConfig, Scheme
from tinyllm_ray.train.optimizer import set_learning_rate
from tinyllm_ray.train.packed_optimizer import Mixing, PackedAdamW, build_packed_optimizer, clip_scales, gradient_norms

MODELS = 3
SHAPES = ((5, 4), (4,), (2, 4))
SETTINGS: dict[str, tuple[float, ...]] = {
    "rate": (0.01, 0.003, 0.1),
    "beta1": (0.9, 0.0, 0.95),
    "beta2": (0.999, 0.95, 0.99),
    "eps": (1e-8, 1e-3, 1e-5),
    "decay": (0.1, 0.0, 0.5),
}


def random_weights(dtype: torch.dtype = torch.float64, models: int = MODELS) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(models, *shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [nn.Parameter(weight.to(dtype)) for weight in drawn]


def give_gradients(weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)


def solo_weights(weights: list[nn.Parameter], worker: int) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach()[worker].clone()) for weight in weights]


def solo_optimizer(weights: list[nn.Parameter], **settings: Any) -> torch.optim.AdamW:
    """PyTorch's plainest AdamW."""
    decay = settings.pop("weight_decay")
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": decay},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, foreach=False, fused=False, **settings)


def packed_optimizer(weights: list[nn.Parameter], **changes: Any) -> PackedAdamW:
    settings: dict[str, Any] = {
        "learning_rate": SETTINGS["rate"],
        "betas": (SETTINGS["beta1"], SETTINGS["beta2"]),
        "eps": SETTINGS["eps"],
        "weight_decay": SETTINGS["decay"],
    }
    return PackedAdamW(weights, **settings | changes)


def float32(value: float) -> float:
    """Rates are kept in float32, as the single model's is."""
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_every_model_moves_as_alone_under_its_own_settings(dtype: torch.dtype, tolerance: float) -> None:
    weights = random_weights(dtype)
    solos = [solo_weights(random_weights(), worker) for worker in range(MODELS)]
    optimizer = packed_optimizer(weights)
    others = [
        solo_optimizer(
            solo,
            lr=float32(SETTINGS["rate"][worker]),
            betas=(SETTINGS["beta1"][worker], SETTINGS["beta2"][worker]),
            eps=SETTINGS["eps"][worker],
            weight_decay=SETTINGS["decay"][worker],
        )
        for worker, solo in enumerate(solos)
    ]
    for update in range(20):
        give_gradients(weights, update)
        for worker, (solo, other) in enumerate(zip(solos, others, strict=True)):
            for weight, packed in zip(solo, weights, strict=True):
                assert packed.grad is not None
                weight.grad = packed.grad[worker].double()
            other.step()
        optimizer.step()
        for worker, solo in enumerate(solos):
            for weight, packed in zip(solo, weights, strict=True):
                error = (packed[worker].double() - weight).norm() / weight.norm()
                assert error < tolerance, f"update {update}, model {worker}"


def test_the_recipes_settings_are_every_models() -> None:
    config = OptimizerConfig(peak_learning_rate=1.0, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.25)
    weights = random_weights()
    before = [weight.detach().clone() for weight in weights]
    optimizer = build_packed_optimizer(weights, config)
    set_learning_rate(optimizer, 0.5)
    for group, decay in zip(optimizer.param_groups, (0.25, 0.0), strict=True):
        assert group["lr"].tolist() == [0.5] * MODELS
        assert [group[name].tolist() for name in ("beta1", "beta2", "eps", "weight_decay")] == [
            [value] * MODELS for value in (0.8, 0.97, 1e-6, decay)
        ]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)  # no gradient, no step: what is left is the decay
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(weight.detach(), old * (1 - 0.5 * 0.25 if weight.ndim == 3 else 1))


class TestStop:
    @pytest.mark.parametrize("first", [0, 3])
    def test_a_stopped_model_stays_and_the_others_go_on(self, first: int) -> None:
        """`first` 0: it never made a step, so that its step count of zero meets the bias corrections."""
        weights, alone = random_weights(), random_weights()
        optimizer, other = packed_optimizer(weights), packed_optimizer(alone)
        for update in range(first + 3):
            give_gradients(weights, update)
            give_gradients(alone, update)
            if update == first:
                optimizer.stop(torch.tensor([False, True, False]))
                kept = copy.deepcopy((optimizer.state_dict()["state"], [weight.detach() for weight in weights]))
            if update >= first:
                for weight in weights:
                    assert weight.grad is not None
                    weight.grad[1] = (math.nan, math.inf, -math.inf)[update - first]
            optimizer.step()
            other.step()
        assert optimizer.stopped.tolist() == [False, True, False]
        state = optimizer.state_dict()["state"]
        for number, weight in enumerate(weights):
            assert torch.equal(weight.detach()[1], kept[1][number][1])
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[number][name][1], kept[0][number][name][1])
            for worker in (0, 2):
                assert torch.equal(weight[worker], alone[number][worker])
        for number in range(len(weights)):
            assert state[number]["step"].tolist() == [first + 3, first, first + 3]

    def test_stopping_adds_up(self) -> None:
        optimizer = packed_optimizer(random_weights())
        for which in ([True, False, False], [False, False, True], [False, False, False]):
            optimizer.stop(torch.tensor(which))
        assert optimizer.stopped.tolist() == [True, False, True]

    @pytest.mark.parametrize("scheme", ["awc", "atc"])
    def test_a_stopped_model_takes_nothing_from_the_others_either(self, scheme: Scheme) -> None:
        weights = random_weights()
        optimizer = packed_optimizer(weights)
        kept = [weight.detach()[1].clone() for weight in weights]
        give_gradients(weights, 0)
        optimizer.stop(torch.tensor([False, True, False]))
        optimizer.step(mixing=Mixing(scheme, torch.full((MODELS, MODELS), 1 / MODELS, dtype=torch.float64)))
        for weight, old in zip(weights, kept, strict=True):
            assert torch.equal(weight.detach()[1], old)
            assert not torch.equal(weight.detach()[0], old)


def test_state_goes_through_a_file_and_stays_shared(tmp_path: Any) -> None:
    weights = random_weights()
    optimizer = packed_optimizer(weights)
    give_gradients(weights, 0)
    optimizer.step()
    optimizer.stop(torch.tensor([True, False, False]))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    copied = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = PackedAdamW(copied)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for update in range(1, 4):
        for one, other in ((weights, optimizer), (copied, resumed)):
            set_learning_rate(other, 0.01 * update)
            give_gradients(one, update)
            other.step()
        if update == 2:
            for other in (optimizer, resumed):
                other.stop(torch.tensor([False, False, True]))
    for weight, other_weight in zip(weights, copied, strict=True):
        assert torch.equal(weight, other_weight)
    assert [state["step"].tolist() for state in resumed.state.values()] == [[1, 4, 3]] * len(weights)


def clip(weights: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """Scale gradients as an update does, in place; the norms before that."""
    weights = list(weights)
    norms = gradient_norms(weights)
    scales = clip_scales(norms, limit)
    for weight in weights:
        if scales is not None and weight.grad is not None:
            weight.grad.mul_(scales.view(-1, *[1] * (weight.ndim - 1)))
    return norms


class TestClip:
    @staticmethod
    def weights() -> list[nn.Parameter]:
        """Gradients of norm 5, 0.5 and 0, each in two weights."""
        weights = [nn.Parameter(torch.zeros(3, 2, 1)), nn.Parameter(torch.zeros(3, 1))]
        weights[0].grad = torch.tensor([[[3.0], [0.0]], [[0.3], [0.0]], [[0.0], [0.0]]])
        weights[1].grad = torch.tensor([[4.0], [0.4], [0.0]])
        return weights

    @pytest.mark.parametrize(
        ("limit", "scales"), [(1.0, (0.2, 1.0)), (0.25, (0.05, 0.5)), (10.0, (1.0, 1.0)), (None, (1.0, 1.0))]
    )
    def test_scales_each_model_to_the_limit_and_tells_norms_before(
        self, limit: float | None, scales: tuple[float, float]
    ) -> None:
        weights = self.weights()
        norms = clip(iter(weights), limit)
        assert norms.tolist() == pytest.approx([5.0, 0.5, 0.0])
        matrix, scale = (weight.grad for weight in weights)
        assert matrix is not None
        assert scale is not None
        assert matrix[:, 0, 0].tolist() == pytest.approx([3 * scales[0], 0.3 * scales[1], 0.0], rel=1e-5)
        assert scale[:, 0].tolist() == pytest.approx([4 * scales[0], 0.4 * scales[1], 0.0], rel=1e-5)

    @pytest.mark.parametrize("limit", [1.0, None])
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_a_norm_that_is_not_finite_shows_in_its_own_model_alone(self, limit: float | None, value: float) -> None:
        weights = self.weights()
        assert weights[0].grad is not None
        weights[0].grad[0, 0, 0] = value
        norms = clip(weights, limit)
        assert norms.isfinite().tolist() == [False, True, True]
        assert weights[0].grad[1:].isfinite().all()

    def test_equals_pytorchs_of_every_model_alone(self) -> None:
        weights = random_weights()
        give_gradients(weights, 0)
        solos = [solo_weights(weights, worker) for worker in range(MODELS)]
        expected = []
        for worker, solo in enumerate(solos):
            for weight, packed in zip(solo, weights, strict=True):
                assert packed.grad is not None
                weight.grad = packed.grad[worker].clone()
            expected.append(torch.nn.utils.clip_grad_norm_(solo, 0.5))
        torch.testing.assert_close(clip(weights, 0.5), torch.stack(expected))
        for worker, solo in enumerate(solos):
            for weight, packed in zip(solo, weights, strict=True):
                assert packed.grad is not None
                torch.testing.assert_close(packed.grad[worker], weight.grad, rtol=1e-12, atol=0)
