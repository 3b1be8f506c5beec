"""How one update of N models executes: gradients, the guard against faults, clipping one by one, AdamW, mixing."""

import torch

from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.packed import PackedLlama, deal
from tinyllm_ray.sections import Scheme
from tinyllm_ray.train.packed_backward import Backward
from tinyllm_ray.train.packed_optimizer import Mixing, PackedAdamW, clip_scales, gradient_norms
from tinyllm_ray.train.update import Statistics


class PackedUpdate:
    """Runs updates of N models; `scheme` None mixes nothing.

    A model whose loss or gradient norm is not finite stays as it was before that update, for good, and its later losses
    are nan. Where models are mixed, all stop with the first. The guard lives on the device: nothing waits for it.
    """

    def __init__(
        self,
        model: PackedLlama,
        optimizer: PackedAdamW,
        backward: Backward,
        *,
        gradient_clip: float | None,
        scheme: Scheme | None = None,
        backend: str = "auto",
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._backward = backward
        self._gradient_clip = gradient_clip
        self._scheme = scheme
        self._backend = backend

    def __call__(self, batch: torch.Tensor, matrix: torch.Tensor | None = None) -> Statistics:
        """One update on int64 rows [N R, T + 1], dealt to the models in turn; losses and norms are [N].

        `matrix` is the update's W [N, N] where there is a scheme. Learning rates are those in the optimizer.
        """
        optimizer = self._optimizer
        with sdpa_backend(self._backend):
            losses = self._backward(deal(batch, self._model.models))
        losses = losses.masked_fill(optimizer.stopped, torch.nan)
        norms = gradient_norms(self._model.parameters())
        faults = ~(losses.isfinite() & norms.isfinite())
        mixing = None
        if self._scheme is not None:
            assert matrix is not None
            mixing, faults = Mixing(self._scheme, matrix), faults.any()
        optimizer.stop(faults)
        optimizer.step(gradient_scale=clip_scales(norms, self._gradient_clip), mixing=mixing)
        optimizer.zero_grad()
        return Statistics(losses, norms)
