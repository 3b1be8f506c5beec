"""AdamW and clipping for N models side by side: every weight is [N, ...], every setting may differ by model."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tinyllm_ray.sections import OptimizerConfig

Setting = float | Sequence[float]
"""One value for all models, or one for each."""


class PackedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) of N models, each as `torch.optim.AdamW` would train it alone.

    Weights are [N, ...]; learning rate, betas, eps and decay are tensors [N] on their device, so that a captured update
    reads what was set last. Weight decay is for matrices ([N, out, in]), norm scales ([N, D]) have none.

    A model for which `stop` was called keeps its weights, moments and step count as they are, whatever its gradients.
    Meant for models that are not mixed: a worker that is would drag the others to where it stands.

    The floor is 28 bytes a float32 weight and update: read weight, gradient and moments, write all but the gradient.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        *,
        learning_rate: Setting = 0.0,
        betas: tuple[Setting, Setting] = (0.9, 0.999),
        eps: Setting = 1e-8,
        weight_decay: Setting = 0.1,
    ) -> None:
        weights = list(weights)
        models, device = len(weights[0]), weights[0].device

        def each(setting: Setting, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            values = [setting] * models if isinstance(setting, int | float) else list(setting)
            return torch.tensor(values, dtype=dtype, device=device)

        shared = {
            "lr": each(learning_rate, torch.float32),  # as the single model's
            "beta1": each(betas[0]),
            "beta2": each(betas[1]),
            "eps": each(eps),
            "step": each(0),
            "stopped": torch.zeros(models, dtype=torch.bool, device=device),
        }
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.ndim > 2], "weight_decay": each(weight_decay)},
            {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": each(0.0)},
        ]
        super().__init__([{**group, **shared} for group in groups], {})
        for weight in weights:
            self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    @property
    def stopped(self) -> torch.Tensor:
        """Which models keep what they have, bool [N]."""
        stopped: torch.Tensor = self.param_groups[0]["stopped"]
        return stopped

    def stop(self, which: torch.Tensor) -> None:
        """From here on the models of `which`, bool [N], stay as they are; nothing is read from the device."""
        self.stopped.logical_or_(which)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients have to be there"
        first = self.param_groups[0]
        first["step"] += ~first["stopped"]  # in place: the groups share it
        for group in self.param_groups:
            scales = _Scales(group)
            for weight in group["params"]:
                _update(weight, self.state[weight], scales)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; the groups share their tensors again afterwards, on the weights' device."""
        super().load_state_dict(state_dict)
        device = self.param_groups[0]["params"][0].device
        first = self.param_groups[0]
        for name in ("lr", "beta1", "beta2", "eps", "step", "stopped"):
            first[name] = first[name].to(device)
            for group in self.param_groups:
                group[name] = first[name]
        for group in self.param_groups:
            group["weight_decay"] = group["weight_decay"].to(device)


class _Scales:
    """What an update multiplies by, float64 [N]: 1 - 0.999 has no four digits in float32.

    For a stopped model they are those that change nothing.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        stopped, step, rate = group["stopped"], group["step"].clamp(min=1), group["lr"].double()
        self.stopped = stopped
        self.kept = torch.where(stopped, 1.0, 1 - rate * group["weight_decay"])
        self.fresh1 = torch.where(stopped, 0.0, 1 - group["beta1"])
        self.fresh2 = torch.where(stopped, 0.0, 1 - group["beta2"])
        self.size = torch.where(stopped, 0.0, rate / (1 - group["beta1"] ** step))
        self.root = (1 - group["beta2"] ** step).sqrt()
        self.eps = group["eps"]


def _update(weight: torch.Tensor, state: dict[str, torch.Tensor], scales: _Scales) -> None:
    """One step of one weight in all models, as `torch.optim.AdamW` orders its operations."""
    assert weight.grad is not None

    def wide(scale: torch.Tensor) -> torch.Tensor:
        return scale.to(weight.dtype if scale.dtype.is_floating_point else scale.dtype).view(
            -1, *[1] * (weight.ndim - 1)
        )

    gradient = torch.where(wide(scales.stopped), 0.0, weight.grad)
    weight.mul_(wide(scales.kept))
    mean = state["exp_avg"].lerp_(gradient, wide(scales.fresh1).expand_as(gradient))
    square = state["exp_avg_sq"].lerp_(gradient.square_(), wide(scales.fresh2).expand_as(gradient))
    spread = square.sqrt().div_(wide(scales.root)).add_(wide(scales.eps))
    weight.sub_(torch.div(mean, spread, out=spread).mul_(wide(scales.size)))


def build_packed_optimizer(weights: Iterable[nn.Parameter], config: OptimizerConfig) -> PackedAdamW:
    """AdamW as the recipe sets it, the same for every model."""
    return PackedAdamW(weights, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def clip_gradients_per_model(weights: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """Scale each model's gradients to a norm of at most `limit`; the norms before that, [N], on the device.

    Every weight is [N, ...]. `limit` None scales nothing. As `clip_grad_norm_` of each model alone: a norm that is not
    finite spoils the gradients of its own model and no other's.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    each = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    if limit is not None:
        scale = (limit / (norms + 1e-6)).clamp(max=1.0)  # PyTorch's guard against a norm of zero
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
    return norms
