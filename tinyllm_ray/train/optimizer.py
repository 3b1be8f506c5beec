"""AdamW as the recipe sets it, with the learning rate as a device tensor."""

from collections.abc import Iterable

import torch
from torch import nn

from tinyllm_ray.sections import OptimizerConfig


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device, captured: bool = False
) -> torch.optim.AdamW:
    """PyTorch's fused AdamW; weight decay on matrices, none on norm scales.

    The learning rate is a scalar tensor on the device, so that a captured or compiled update reads the scheduled
    value instead of the one it saw first. `captured` is whether a CUDA graph will hold the step: PyTorch refuses to
    capture a step that was not announced, and warns of one that was and runs by itself. The fused kernels are the same
    either way, since they count steps on the device.
    """
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    rate = torch.tensor(0.0, dtype=torch.float32, device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True, capturable=captured)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Put `rate` into the optimizer's learning-rate tensors, without waiting for the device."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def skip_steps_where(optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> None:
    """From here on a step at which `flag` (a float32 scalar on the device) is 1.0 changes nothing.

    Weights, moments and step counters keep their bits, and the host reads nothing: the fused kernels look at
    `found_inf`, the attribute through which GradScaler skips the steps of every optimizer with
    `_step_supports_amp_scaling` (torch/amp/grad_scaler.py).
    """
    optimizer.found_inf = flag  # type: ignore[attr-defined]


def clip_gradients(weights: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """Scale the gradients to a global norm of at most `limit`; the norm before that, on the device.

    `clip_grad_norm_` with an infinite limit multiplies by one, so without a limit only the norm is taken.
    """
    weights = list(weights)
    if limit is None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, foreach=True)
    return torch.nn.utils.clip_grad_norm_(weights, limit, foreach=True)
