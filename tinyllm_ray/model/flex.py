"""Causal attention by PyTorch's FlexAttention (Dong et al., arXiv 2412.05496), which skips blocks of later keys."""

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_masks: dict[tuple[int, str], BlockMask] = {}
"""By context length and device."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`attention.attend` on FlexAttention: inside compiled code a part of it, outside compiled by itself.

    On a CPU, where it has no backward pass, PyTorch's unfused form serves outside of compiled code.
    """
    length, device = query.shape[2], query.device
    mask = _masks.get((length, str(device)))
    compiling = torch.compiler.is_compiling()
    if mask is None:
        # While compiling it becomes a part of the graph; what is kept is made outside of it.
        mask = _causal_mask(length, device) if compiling else prepare(length, device)
    function = _compiled() if query.is_cuda and not compiling else flex_attention
    attended: torch.Tensor = function(query, key, value, block_mask=mask)
    return attended


def prepare(length: int, device: torch.device) -> BlockMask:
    """The causal mask of this many positions, made once and kept."""
    mask = _causal_mask(length, device)
    # By the device as tensors name it: `cuda` is `cuda:0` there.
    return _masks.setdefault((length, str(mask.kv_num_blocks.device)), mask)


def _causal_mask(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(_sees, None, None, length, length, device=device)


def _sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Whether the query at one position sees the key at another."""
    return query >= key


@functools.cache
def _compiled() -> Any:
    # Here and not at import: torch.compile imports the compiler, which takes seconds.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
