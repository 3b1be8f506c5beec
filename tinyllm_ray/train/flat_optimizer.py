"""AdamW over a model's flat buffers, with the norm, the guard against faults and clipping in its kernels."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tinyllm_ray.sections import OptimizerConfig
from tinyllm_ray.train.flat_buffers import FlatBuffers
from tinyllm_ray.train.flat_kernel import collect, settle, update


class FlatAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) as `torch.optim.AdamW` has it, of the weights in `buffers`.

    What it holds for a weight has AdamW's names, shapes and dtypes, so that either goes on from the other's checkpoint:
    views of the flat moments, and one count of steps for all. The learning rate is a scalar tensor on the device, as
    `build_optimizer` makes it; betas, eps, decay and the norm's limit are those of `config`. Matrices decay, norm
    scales do not.

    It is no `PackedAdamW` of one model, though its arithmetic is that one's: a parameter's `grad` has the parameter's
    dtype, where here bf16 gradients belong to float32 weights; a count of steps is [N] there; and about fifty small
    kernels that prepare its step would take 0.1 ms, nearly as long as the step (20m).

    From the first update whose loss or gradient norm is not finite weights, moments and count keep their bits.
    """

    def __init__(self, buffers: FlatBuffers, config: OptimizerConfig, micro_batches: int) -> None:
        weights, device = list(buffers.weights.values()), buffers.masters.device
        self._buffers = buffers
        self._rate = torch.zeros((), device=device)
        settings = {"lr": self._rate, "betas": config.betas, "eps": config.eps}
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, settings)
        limit = math.inf if config.gradient_clip is None else config.gradient_clip
        numbers = [*config.betas, config.eps, config.weight_decay, limit, micro_batches]
        self._settings = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._partials = torch.zeros(sum(one.blocks for one in buffers.places), dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._figures = torch.zeros(8, dtype=torch.float64, device=device)
        self._steps = torch.zeros((), device=device)
        self.stopped = torch.zeros((), device=device)
        """On the device: 0.0, and 1.0 from the first fault on."""
        means, squares = (buffers.views(moment) for moment in buffers.moments)
        self._own: dict[torch.Tensor, dict[str, torch.Tensor]] = {
            weight: {"step": self._steps, "exp_avg": mean.view_as(weight), "exp_avg_sq": square.view_as(weight)}
            for weight, mean, square in zip(weights, means, squares, strict=True)
        }
        self.state.update(self._own)

    def take_up_loaded(self) -> None:
        """Before an update, on the host: what was loaded since the last one, weights or state, counts from here on."""
        self._buffers.refresh_if_changed()
        for weight, own in self._own.items():
            held = self.state.get(weight)
            if held is own:
                continue
            for key, tensor in own.items():
                value = (held or {}).get(key)
                tensor.zero_() if value is None else tensor.copy_(value)
            self.state[weight] = own

    def collect(self, loss: torch.Tensor, gradients: Sequence[torch.Tensor], *, first: bool) -> None:
        """Take a micro-batch's mean loss and its share of the update's gradients, in the order of `twin_weights`."""
        matrices = len(self._buffers.places[0].first)
        halves = (gradients[:matrices], gradients[matrices:])
        buffers = self._buffers
        collect(halves, buffers.places, buffers.gradients, self._partials, loss, self._total, add=not first)

    def settle(self) -> torch.Tensor:
        """Loss and gradient norm of what was collected, [2]; decides whether `step` may change anything."""
        said = self._buffers.masters.new_empty(2)
        settle(self._partials, self._total, self._settings, self._rate, self._steps, self.stopped, self._figures, said)
        return said

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The step that `settle` prepared."""
        assert closure is None, "gradients have to be there"
        buffers = self._buffers
        update(buffers.masters, *buffers.moments, buffers.shadows, buffers.gradients, self._figures)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; the tensors that the update reads stay the same."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._rate.fill_(group["lr"])
            group["lr"] = self._rate
        self.take_up_loaded()
