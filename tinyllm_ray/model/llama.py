"""The decoder: Llama's architecture (Touvron et al., arXiv 2302.13971) with tied embeddings and no biases.

Shapes in the comments: B rows, T tokens a row, D width, H heads, F features a head.
"""

import torch
from torch import nn
from torch.nn import functional

from tinyllm_ray.model.attention import attend
from tinyllm_ray.sections import ModelConfig


class RMSNorm(nn.Module):
    """Root mean square normalisation with a learned scale (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, F]
        attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(functional.silu(gate) * up)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each on normalised input and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        cos, sin = rotary_tables(config.context, config.width // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The normalised states [B, T, D] that the logits are a projection of."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: torch.Tensor = self.norm(x)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.embedding.weight)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a target, accumulated in float32 (float64 for a float64 model)."""
        logits = self(inputs).flatten(0, 1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(wide, targets.flatten())


def allocate(config: ModelConfig) -> Llama:
    """A model on the CPU whose weights are still to be set; its rotary tables are."""
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    model.cos, model.sin = rotary_tables(config.context, config.width // config.heads, config.rope_theta)
    return model


def initialize(config: ModelConfig, seed: int) -> Llama:
    """A model with matrices from N(0, init_std) and norm scales of one; the weights depend on `seed` alone.

    Drawn on the CPU, parameter by parameter in the order of their names, so that every device starts from the same.
    """
    model = allocate(config)
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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [B, H, T, F]: feature i is paired with i + F/2, as in Hugging Face's Llama."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
