"""One model's weights, moments and gradients in flat buffers, and the twin of it that training runs.

The model that everyone else sees (evaluation, checkpoints, export) has its parameters, under their own names, in
`masters`. Its twin computes with the matrices as `shadows`, in the dtype the products have (bf16 on a GPU), so that no
kernel casts a weight; the norm scales it shares with the model. The update writes both. Whatever else changes the
masters leaves the shadows behind, until `refresh_if_changed`.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from tinyllm_ray.model.llama import Llama
from tinyllm_ray.train.flat_kernel import BLOCK, place


class FlatBuffers:
    """Flat buffers of `model`, whose parameters become views of them, of equal values.

    Matrices come first, then norm scales; each begins with a block of `BLOCK` elements and is padded with zeros to
    whole ones, M elements of matrices in a buffer of P. With one micro-batch an update gradients stay in the dtype that
    the backward pass gives them, with more they are summed in the masters'.
    """

    def __init__(self, model: Llama, compute_dtype: torch.dtype, micro_batches: int) -> None:
        named = sorted(model.named_parameters(), key=lambda item: item[1].ndim < 2)  # stable: matrices, then scales
        matrices = [weight.numel() for _, weight in named if weight.ndim >= 2]
        scales = [weight.numel() for _, weight in named if weight.ndim < 2]
        self.places = (place(matrices), place(scales))
        """Of matrices and of norm scales, in the order of the twin's."""
        elements, of_scales = (one.blocks * BLOCK for one in self.places)
        like = model.embedding.weight.detach()
        self.masters = like.new_zeros(elements + of_scales)
        """[P]."""
        self.moments = (torch.zeros_like(self.masters), torch.zeros_like(self.masters))
        """Means of the gradients and of their squares, [P] each."""
        self.shadows = like.new_zeros(elements, dtype=compute_dtype)
        """[M]."""
        self.gradients = (
            like.new_zeros(elements, dtype=compute_dtype if micro_batches == 1 else like.dtype),
            like.new_zeros(of_scales),
        )
        """Of matrices [M] and of norm scales [P - M], means over the update's targets, not clipped."""
        self.weights = _put(model, named, self.views(self.masters))
        """The model's parameters by name, matrices first."""
        self.twin, self.twin_weights = self._build_twin(model)
        """What training runs, and its parameters in the order of `weights`."""
        self._version = -1
        self.refresh_if_changed()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The weights' shares of a buffer laid out as the masters, or as their matrices alone, without the padding."""
        matrices, scales = self.places
        begins = [*matrices.first, *(matrices.blocks + first for first in scales.first)]
        lengths = [*matrices.length, *scales.length]
        return [
            flat[begin * BLOCK : begin * BLOCK + length]
            for begin, length in zip(begins, lengths, strict=True)
            if begin * BLOCK < len(flat)
        ]

    def refresh_if_changed(self) -> None:
        """Make the shadows anew where anything but the update wrote to the masters.

        PyTorch counts in-place writes to a tensor, over all of its views; what Triton writes it does not see. So
        nobody who fills the model's weights, from a checkpoint or by hand, has to think of the shadows.
        """
        if self.masters._version != self._version:
            self.shadows.copy_(self.masters[: len(self.shadows)])
            self._version = self.masters._version

    def _build_twin(self, model: Llama) -> tuple[Llama, list[nn.Parameter]]:
        """A copy of the model, whatever it is made of, with the shadows for matrices; and its weights in our order."""
        weights = list(self.weights.values())
        shadows = self.views(self.shadows)
        same = {id(tensor): tensor for tensor in (*weights[len(shadows) :], *model.buffers())}
        own = {
            id(weight): nn.Parameter(shadow.view(weight.shape))
            for weight, shadow in zip(weights, shadows, strict=False)
        }
        twin = copy.deepcopy(model, {**same, **own})
        twin.embedding = _WideEmbedding(own[id(model.embedding.weight)], self.masters.dtype)
        return twin, [twin.get_parameter(name) for name in self.weights]


class _WideEmbedding(nn.Embedding):
    """Rows of a table, widened to `dtype`.

    The residual stream begins with what the embedding gives. From a bf16 table it would be in bf16 all through, where
    the model's is in float32 unless the execution says otherwise.
    """

    def __init__(self, table: nn.Parameter, dtype: torch.dtype) -> None:
        rows, width = table.shape
        super().__init__(rows, width, device="meta")
        self.weight = table
        self.dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight).to(self.dtype)


def _put(
    model: Llama, named: Sequence[tuple[str, nn.Parameter]], views: Sequence[torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Give the model's weights their places: as new parameters, since the old ones count their writes by themselves."""
    weights = {}
    for (name, weight), view in zip(named, views, strict=True):
        view.copy_(weight.detach().flatten())
        module, _, leaf = name.rpartition(".")
        weights[name] = nn.Parameter(view.view(weight.shape))
        setattr(model.get_submodule(module), leaf, weights[name])
    return weights
