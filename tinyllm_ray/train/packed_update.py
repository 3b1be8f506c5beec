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
        self._backend = backend
        self._mixing: Mixing | None = None
        if scheme is not None:
            weight = next(model.parameters())
            self._mixing = Mixing(scheme, torch.zeros(model.models, model.models, dtype=weight.dtype).to(weight.device))

    def __call__(self, batch: torch.Tensor, matrix: torch.Tensor | None = None) -> Statistics:
        """Both parts of an update; `matrix` is its W [N, N] where there is a scheme."""
        if self._mixing is not None:
            assert matrix is not None
            self.mix_by(matrix)
        return self.run(batch)

    def mix_by(self, matrix: torch.Tensor) -> None:
        """Have updates mix by `matrix`, W [N, N], from here on: a part of the host's, beside the learning rates."""
        assert self._mixing is not None
        self._mixing.matrix.copy_(matrix)

    def run(self, batch: torch.Tensor) -> Statistics:
        """The device's part, on int64 rows [N R, T + 1], dealt to the models in turn; its statistics are [N].

        Learning rates and mixing matrix are those that were settled last. Whatever lives longer than the update stays
        where it is in memory.
        """
        optimizer, mixing = self._optimizer, self._mixing
        with sdpa_backend(self._backend):
            losses = self._backward(deal(batch, self._model.models))
        losses = losses.masked_fill(optimizer.stopped, torch.nan)
        norms = gradient_norms(self._model.parameters())
        faults = ~(losses.isfinite() & norms.isfinite())
        optimizer.stop(faults if mixing is None else faults.any())
        optimizer.step(gradient_scale=clip_scales(norms, self._gradient_clip), mixing=mixing)
        optimizer.zero_grad()
        return Statistics(losses, norms)
