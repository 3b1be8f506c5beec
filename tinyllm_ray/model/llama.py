"""The decoder: Llama's architecture (Touvron et al., arXiv 2302.13971) with tied embeddings and no biases.

Matrix products and attention are here; what lies between them is computed as `Operations` say. Shapes in the comments:
B rows, T tokens a row, D width, H heads, F features a head.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from tinyllm_ray.model.attention import attend
from tinyllm_ray.model.operations import TORCH, Operations
from tinyllm_ray.sections import ModelConfig


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned scale (Zhang and Sennrich, arXiv 1910.07467).

    Takes the residual stream x and what the last layer adds to it; gives the stream with that added, and normalised:
    the sum and its norm are one pass over memory where one kernel makes both.
    """

    def __init__(self, width: int, eps: float, operations: Operations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.operations = operations

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.operations.add_norm(x, delta, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.operations = operations

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        query, key, value = self.operations.project(x, self.qkv, cos, sin, self.heads)  # each [B, H, T, F]
        attended = attend(query, key, value)
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations.feed_forward(x, self.gate_up, self.down)


class Block(nn.Module):
    """Attention and feed-forward, each on normalised input and added to the residual stream.

    Takes the stream and what the block before adds to it, and leaves its own last addition to the norm that follows.
    """

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps, operations)
        self.attention = Attention(config, operations)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps, operations)
        self.ffn = FeedForward(config, operations)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention_norm(x, delta)
        x, normed = self.ffn_norm(x, self.attention(normed, cos, sin))
        return x, self.ffn(normed)


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary].

    >>> import torch
    >>> from tinyllm_ray.config import load
    >>> from tinyllm_ray.model.llama import initialize
    >>> model = initialize(load("nano").model, seed=0)
    >>> tokens = torch.arange(64).reshape(2, 32)
    >>> model(tokens).shape
    torch.Size([2, 32, 32000])
    >>> round(model.loss(tokens[:, :-1], tokens[:, 1:]).item(), 1)  # near log(32000) = 10.4, as nothing is learned yet
    10.4
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, operations: Operations = TORCH) -> None:
        super().__init__()
        self.config = config
        self.operations = operations
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, operations) for _ in range(config.layers))
        # The loss wants no sum from the last norm, and a kernel of ours would keep Inductor from compiling at all:
        # before torch 2.13 it writes out the arguments of an operator that it meets first, here the loss, and all that
        # they were made from, each layer's twice (8 layers: more than 120 s). Its own nodes it only names.
        self.norm = RMSNorm(config.width, config.norm_eps, TORCH)
        cos, sin = rotary_tables(config.context, config.width // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The normalised states [B, T, D] that the logits are a projection of."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x, delta = self.operations.residual(self.embedding(tokens)), None
        for block in self.blocks:
            x, delta = self.operations.run(block, x, delta, cos, sin)
        _, normed = self.norm(x, delta)
        out: torch.Tensor = normed
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.embedding.weight)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a target, accumulated in float32 (float64 for a float64 model)."""
        return self.operations.loss(self.hidden(inputs).flatten(0, 1), self.embedding.weight, targets.flatten())

    def sharing(self, operations: Operations) -> "Llama":
        """This model with other operations, in the same memory: what trains one trains the other."""
        if operations == self.operations:
            return self
        return over(dict(self.named_parameters()), self.config, self.cos, self.sin, operations)


def over(
    weights: Mapping[str, torch.Tensor],
    config: ModelConfig,
    cos: torch.Tensor,
    sin: torch.Tensor,
    operations: Operations = TORCH,
) -> Llama:
    """A model whose weights and rotary tables are these tensors' memory; gradients are its own."""
    with torch.device("meta"):
        model = Llama(config, operations)
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()}, assign=True)
    model.cos, model.sin = cos, sin
    return model


def allocate(config: ModelConfig, operations: Operations = TORCH) -> Llama:
    """A model on the CPU whose weights are still to be set; its rotary tables are."""
    with torch.device("meta"):
        model = Llama(config, operations)
    model.to_empty(device="cpu")
    model.cos, model.sin = rotary_tables(config.context, config.width // config.heads, config.rope_theta)
    return model


def initialize(config: ModelConfig, seed: int, operations: Operations = TORCH) -> Llama:
    """A model with matrices from N(0, init_std) and norm scales of one; the weights depend on `seed` alone.

    Drawn on the CPU, parameter by parameter in the order of their names, so that every device starts from the same.
    """
    model = allocate(config, operations)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, config.init_std, generator=generator)
    return model


def rotary_tables(context: int, features: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [context, features/2] of rotary positions (Su et al., arXiv 2104.09864), from float64."""
    frequencies = theta ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()
