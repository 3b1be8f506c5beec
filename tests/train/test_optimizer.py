"""AdamW's groups, its rate on the device, and clipping."""

import math

import pytest
import torch
from torch import nn

from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import ModelConfig, OptimizerConfig
from tinyllm_ray.train.optimizer import build_optimizer, clip_gradients, set_learning_rate, skip_steps_where

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Llama:
    return initialize(ModelConfig(layers=1, width=8, heads=2, ffn=8, context=4, vocab_size=11), seed=0)


def settings(**changes: object) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"peak_learning_rate": 1.0, "betas": (0.8, 0.97), **changes})


def test_only_matrices_decay(model: Llama) -> None:
    optimizer = build_optimizer(model, settings(weight_decay=0.25), CPU)
    set_learning_rate(optimizer, 0.5)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)  # no gradient, no step: what is left is the decay
    optimizer.step()
    for name, weight in model.named_parameters():
        kept = 1.0 if name.endswith("norm.weight") else 1 - 0.5 * 0.25
        torch.testing.assert_close(weight.detach(), before[name] * kept, msg=name)


def test_every_weight_is_in_one_group_with_the_recipes_settings(model: Llama) -> None:
    optimizer = build_optimizer(model, settings(eps=1e-6, weight_decay=0.25), CPU)
    held = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(held) == sorted(id(weight) for weight in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.8, 0.97), 1e-6, False)


def test_the_rate_is_set_in_place_for_every_group(model: Llama) -> None:
    optimizer = build_optimizer(model, settings(), CPU)
    tensors = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.125)
    for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
        assert group["lr"] is tensor
        assert tensor.item() == 0.125


def test_a_step_is_announced_to_pytorch_where_a_graph_will_hold_it(model: Llama) -> None:
    """Unannounced it is refused, and needlessly announced PyTorch warns of it."""
    for asked in (False, True):
        optimizer = build_optimizer(model, settings(), CPU, captured=asked)
        assert [group["capturable"] for group in optimizer.param_groups] == [asked] * 2


@pytest.mark.parametrize("gradient", [1.0, math.nan, math.inf])
def test_a_step_that_is_to_be_skipped_changes_no_bit(model: Llama, gradient: float) -> None:
    optimizer = build_optimizer(model, settings(weight_decay=0.25), CPU)
    set_learning_rate(optimizer, 0.5)
    flag = torch.zeros(())
    skip_steps_where(optimizer, flag)

    def step(value: float) -> list[torch.Tensor]:
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, value)
        optimizer.step()
        held = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *held)]

    first = step(1.0)
    flag.fill_(1.0)
    assert all(map(torch.equal, step(gradient), first))
    flag.zero_()
    assert not any(map(torch.equal, step(1.0), first))


class TestClip:
    @staticmethod
    def weights() -> list[nn.Parameter]:
        """Gradients (3, 0) and (4): a norm of 5."""
        weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
        weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
        return weights

    @pytest.mark.parametrize(("limit", "scale"), [(1.0, 0.2), (2.5, 0.5), (10.0, 1.0), (None, 1.0)])
    def test_scales_to_the_limit_and_tells_the_norm_before(self, limit: float | None, scale: float) -> None:
        weights = self.weights()
        norm = clip_gradients(iter(weights), limit)
        assert norm.item() == pytest.approx(5.0)
        torch.testing.assert_close(weights[0].grad, torch.tensor([3.0 * scale, 0.0]), rtol=1e-5, atol=0)
        torch.testing.assert_close(weights[1].grad, torch.tensor([4.0 * scale]), rtol=1e-5, atol=0)
        assert weights[2].grad is None

    @pytest.mark.parametrize("limit", [1.0, None])
    def test_a_norm_that_is_not_finite_shows(self, limit: float | None) -> None:
        weights = self.weights()
        weights[0].grad = torch.tensor([math.inf, 0.0])
        assert not math.isfinite(clip_gradients(weights, limit).item())
