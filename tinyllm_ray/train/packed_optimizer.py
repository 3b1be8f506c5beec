"""AdamW, clipping and mixing of N models side by side: every weight is [N, ...], every setting may differ by model."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tinyllm_ray.sections import OptimizerConfig, Scheme
from tinyllm_ray.train.mixing import mix

Setting = float | Sequence[float]
"""One value for all models, or one for each."""


class Mixing(NamedTuple):
    """How an update mixes."""

    scheme: Scheme
    matrix: torch.Tensor
    """W [N, N] in the weights' dtype, on their device."""


class PackedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) of N models, each as `torch.optim.AdamW` would train it alone.

    Weights are [N, ...]; learning rate, betas, eps and decay are tensors [N] on their device, so that a captured update
    reads what was set last. Weight decay is for matrices ([N, out, in]), norm scales ([N, D]) have none.

    A model for which `stop` was called keeps its weights, moments and step count as they are, whatever its gradients
    are and whatever is mixed. Others that mix with it still take their share of it.

    The floor is 28 bytes a float32 weight and update, mixing and clipping included: read weight, gradient and moments,
    write all but the gradient. On CUDA (`fused`) one kernel a weight keeps to it.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        *,
        learning_rate: Setting = 0.0,
        betas: tuple[Setting, Setting] = (0.9, 0.999),
        eps: Setting = 1e-8,
        weight_decay: Setting = 0.1,
        fused: bool | None = None,
    ) -> None:
        weights = list(weights)
        models, device = len(weights[0]), weights[0].device
        self.fused = device.type == "cuda" if fused is None else fused

        def each(setting: Setting, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            values = [setting] * models if isinstance(setting, int | float) else list(setting)
            return torch.tensor(values, dtype=dtype, device=device)

        settings = {
            "lr": each(learning_rate, torch.float32),  # as the single model's
            "beta1": each(betas[0]),
            "beta2": each(betas[1]),
            "eps": each(eps),
        }
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.ndim > 2], "weight_decay": each(weight_decay)},
            {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": each(0.0)},
        ]
        super().__init__([{**group, **settings} for group in groups], {})
        self.stopped = torch.zeros(models, dtype=torch.bool, device=device)
        """Which models keep what they have, [N]."""
        self._steps = each(0)
        for weight in weights:
            moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self.state[weight] = {**moments, "step": self._steps, "stopped": self.stopped}

    def stop(self, which: torch.Tensor) -> None:
        """From here on the models of `which`, bool [N], stay as they are; nothing is read from the device."""
        self.stopped.logical_or_(which)

    def go_on(self, models: Sequence[int]) -> None:
        """Take back that `models` were stopped: a checkpoint from before their fault is to hold nothing of it."""
        self.stopped[list(models)] = False

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: None = None, *, gradient_scale: torch.Tensor | None = None, mixing: Mixing | None = None
    ) -> None:
        """One step on the gradients times `gradient_scale` [N], mixed before or after as `mixing` says."""
        assert closure is None, "gradients have to be there"
        self._steps.add_(~self.stopped)
        if mixing is not None:
            own = torch.eye(len(self.stopped), dtype=mixing.matrix.dtype, device=self.stopped.device)
            mixing = mixing._replace(matrix=torch.where(self.stopped.unsqueeze(1), own, mixing.matrix))
        update = _fused_update if self.fused else _update
        for group in self.param_groups:
            scales = _scales(group, self._steps, self.stopped, gradient_scale)
            for weight in group["params"]:
                update(weight, self.state[weight], scales.to(weight.dtype), mixing)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; afterwards all weights count in the same tensors again, on their device."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            device = group["params"][0].device
            group |= {name: value.to(device) for name, value in group.items() if isinstance(value, torch.Tensor)}
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            state = self.state[weight]
            self._steps.copy_(state["step"])
            self.stopped.copy_(state["stopped"])
            state |= {"step": self._steps, "stopped": self.stopped}


def _scales(
    group: dict[str, Any], steps: torch.Tensor, stopped: torch.Tensor, gradient_scale: torch.Tensor | None
) -> torch.Tensor:
    """What an update multiplies by, [8, N]: gradient, weight, fresh share of either moment, step, root, eps, stopped.

    In float64: 1 - 0.999 has no four digits in float32. For a stopped model they are those that change nothing.
    """
    rate, made = group["lr"].double(), steps.clamp(min=1)
    bias1, bias2 = 1 - group["beta1"] ** made, 1 - group["beta2"] ** made
    scale = torch.ones_like(rate) if gradient_scale is None else gradient_scale.double()
    changes = [1 - rate * group["weight_decay"], 1 - group["beta1"], 1 - group["beta2"], rate / bias1]
    neutral = (1.0, 0.0, 0.0, 0.0)
    kept = [torch.where(stopped, value, change) for value, change in zip(neutral, changes, strict=True)]
    return torch.stack([scale, *kept, bias2.sqrt(), group["eps"], stopped.double()])


def _update(weight: torch.Tensor, state: dict[str, torch.Tensor], scales: torch.Tensor, mixing: Mixing | None) -> None:
    """One step of one weight in all models, as `torch.optim.AdamW` orders its operations."""
    assert weight.grad is not None
    scale, keep, fresh1, fresh2, size, root, eps, stopped = scales.view(8, -1, *[1] * (weight.ndim - 1))
    if mixing is not None and mixing.scheme == "awc":
        mix([weight], mixing.matrix)
    gradient = torch.where(stopped > 0, 0.0, weight.grad * scale)
    weight.mul_(keep)
    mean = state["exp_avg"].lerp_(gradient, fresh1.expand_as(gradient))
    square = state["exp_avg_sq"].lerp_(gradient.square_(), fresh2.expand_as(gradient))
    spread = square.sqrt().div_(root).add_(eps)
    weight.sub_(torch.div(mean, spread, out=spread).mul_(size))
    if mixing is not None and mixing.scheme == "atc":
        mix([weight], mixing.matrix)


def _fused_update(
    weight: torch.Tensor, state: dict[str, torch.Tensor], scales: torch.Tensor, mixing: Mixing | None
) -> None:
    from tinyllm_ray.train.packed_kernel import fused_update  # Triton takes a second to import, and a GPU to run

    assert weight.grad is not None
    scheme, matrix = mixing or (None, None)
    fused_update(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], scales, scheme, matrix)


def build_packed_optimizer(weights: Iterable[nn.Parameter], *configs: OptimizerConfig) -> PackedAdamW:
    """AdamW as the recipe sets it: one setting for every model, or one for each."""
    first = configs[0]
    if len(configs) == 1:
        return PackedAdamW(weights, betas=first.betas, eps=first.eps, weight_decay=first.weight_decay)
    return PackedAdamW(
        weights,
        betas=([config.betas[0] for config in configs], [config.betas[1] for config in configs]),
        eps=[config.eps for config in configs],
        weight_decay=[config.weight_decay for config in configs],
    )


def gradient_norms(weights: Iterable[nn.Parameter]) -> torch.Tensor:
    """Norm of each model's gradients, [N], on the device; every weight is [N, ...]."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    each = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return norms


def clip_scales(norms: torch.Tensor, limit: float | None) -> torch.Tensor | None:
    """What each model's gradients are multiplied by for a norm of at most `limit`, as `clip_grad_norm_` does; [N]."""
    return None if limit is None else (limit / (norms + 1e-6)).clamp(max=1.0)  # PyTorch's guard against a norm of zero
