"""The memory that the processes of a pack map: weights and gradients of all models, an update's rows and losses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.packed import PackedLlama

_ALIGNMENT = 128
"""Numbers that a weight's place in its buffer is a multiple of: 512 bytes in float32, as CUDA's allocator has it."""


@dataclass(frozen=True)
class Shared:
    """What the processes of a pack have in common; tensors are mapped, not copied."""

    config: Config
    weights: torch.Tensor
    """Of all models, as `views_of` divides them."""
    gradients: torch.Tensor
    rows: torch.Tensor
    """Of an update, int64 [N, R, T + 1]."""
    losses: torch.Tensor
    """[N]."""
    cos: torch.Tensor
    sin: torch.Tensor
    threads: int
    """Of CPU operators, in each child."""


def share(model: PackedLlama, config: Config) -> Shared:
    """Memory for the processes to map, into which the model's weights move."""
    weights = list(model.parameters())
    shapes = [weight.shape for weight in weights]
    like = weights[0].detach()

    def allocate(*shape: int, dtype: torch.dtype = like.dtype) -> torch.Tensor:
        return _mapped(like.new_zeros(shape, dtype=dtype))

    shared = Shared(
        config,
        weights=allocate(_starts(shapes)[-1]),
        gradients=allocate(_starts(shapes)[-1]),
        rows=allocate(model.models, config.rows_per_model, config.model.context + 1, dtype=torch.int64),
        losses=allocate(model.models, dtype=torch.promote_types(like.dtype, torch.float32)),
        cos=_mapped(model.cos.clone()),
        sin=_mapped(model.sin.clone()),
        threads=max(1, torch.get_num_threads() // model.models),
    )
    with torch.no_grad():
        for weight, place in zip(weights, views_of(shared.weights, shapes), strict=True):
            weight.data = place.copy_(weight)
    return shared


def views_of(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """`flat` as tensors of `shapes`, one after the other, each on a place of its own."""
    starts = _starts(shapes)
    return [flat[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _starts(shapes: Sequence[torch.Size]) -> list[int]:
    """Where each begins, and where the last one ends."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` moved to where other processes can map it; on a GPU it is there."""
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved
