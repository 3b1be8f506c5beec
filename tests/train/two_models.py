"""Transformers' model beside ours."""

import torch

from tinyllm_ray.model.llama import Llama


def weights_of(model: Llama) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def largest_difference(one: torch.nn.Module, other: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Of two models' logits."""
    with torch.no_grad():
        logits = [found if isinstance(found := model(tokens), torch.Tensor) else found.logits for model in (one, other)]
    return float((logits[0] - logits[1]).abs().max())


def random_tokens(vocab_size: int, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
