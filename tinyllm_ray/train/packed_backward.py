"""How the gradients of N models are made: by kernels that compute all models at once, or by one model's, N times.

`packed_processes` has the third way, a process a model.

At once there are fewer and larger kernels, which is what small micro-batches need. One by one there is one model's
memory beside the weights, and one model's graph to compile (though the compile cache of torch 2.13 does not give out
that of a model alone for it). With 32 rows a model the matrix products of both take the same time (25.2 and 25.6 ms of
an update; 20m, 4 models, 131,072 targets, H200).
"""

from collections.abc import Callable

import torch

from tinyllm_ray.model.llama import Llama
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.train.update import Loss

Backward = Callable[[torch.Tensor], torch.Tensor]
"""Rows dealt to N models [N, R, T + 1] to mean losses [N]; gradients are left in the packed weights."""


class AtOnce:
    """All models' rows in one pass; `loss` is the packed model's, `micro_batch_size` is in rows a model."""

    def __init__(self, loss: Loss, micro_batch_size: int) -> None:
        self._loss = loss
        self._micro_batch_size = micro_batch_size

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = torch.split(rows, self._micro_batch_size, dim=1)
        return torch.stack([self._pass(part, len(parts)) for part in parts]).sum(0)

    def _pass(self, part: torch.Tensor, parts: int) -> torch.Tensor:
        losses = self._loss(part[:, :, :-1], part[:, :, 1:]) / parts
        torch.autograd.backward(losses.sum())
        return losses.detach()


class OneByOne:
    """Model after model, each in micro-batches; `build_loss` makes a single model's loss as it is to be executed."""

    def __init__(self, model: PackedLlama, build_loss: Callable[[Llama], Loss], micro_batch_size: int) -> None:
        self._weights = list(model.parameters())
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        workers = model.workers()
        for number, worker in enumerate(workers):
            for weight, gradient in zip(worker.parameters(), self._gradients, strict=True):
                weight.grad = gradient[number]
        self._losses = [build_loss(worker) for worker in workers]
        self._micro_batch_size = micro_batch_size

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        torch._foreach_zero_(self._gradients)
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        return torch.stack(
            [pass_backward(loss, own, self._micro_batch_size) for loss, own in zip(self._losses, rows, strict=True)]
        )


def pass_backward(loss: Loss, rows: torch.Tensor, micro_batch_size: int) -> torch.Tensor:
    """One model's mean loss over its rows [R, T + 1], whose gradient is added to its weights' in micro-batches."""
    parts = torch.split(rows, micro_batch_size)
    found = []
    for part in parts:
        share = loss(part[:, :-1], part[:, 1:]) / len(parts)
        torch.autograd.backward(share)
        found.append(share.detach())
    return torch.stack(found).sum(0)
