"""N models of one shape side by side: Llama's own layers, with a leading model axis on every weight.

Rows of all models travel folded, [N R, T], model by model: attention, rotary positions and SwiGLU have no weights and
are Llama's own. What has weights (products, norms, the embedding) unfolds them and gives each model's rows its own.
Parameters have Llama's names and shape [N, *Llama's]. N models need as many kernels as one does (Wang et al., HFTA,
arXiv 2102.02344).

Shapes in the comments: N models, R rows a model, T tokens a row, D width, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from tinyllm_ray.model.llama import Llama, RMSNorm, initialize, over
from tinyllm_ray.model.operations import TORCH, Operations
from tinyllm_ray.sections import ModelConfig


class PackedLinear(nn.Module):
    """N linear maps; weight [N, out, in]."""

    def __init__(self, models: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(models, outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, self.weight)


class PackedRMSNorm(RMSNorm):
    """Llama's RMSNorm with a scale for each model; weight [N, D]."""

    def __init__(self, models: int, width: int, eps: float, operations: Operations) -> None:
        super().__init__(width, eps, operations)
        self.weight = nn.Parameter(torch.empty(models, width))


class PackedEmbedding(nn.Module):
    """N tables; weight [N, V, D]. Ids [N, R, T] to features [N R, T, D]."""

    def __init__(self, models: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(models, vocabulary, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        models, vocabulary, _ = self.weight.shape
        first = torch.arange(models, device=tokens.device) * vocabulary  # where each model's table begins
        ids = (tokens + first.view(-1, 1, 1)).flatten(0, 1)
        return functional.embedding(ids, self.weight.flatten(0, 1))


class PackedLlama(nn.Module):
    """Token ids [N, R, T] to logits [N, R, T, V], each model on its own rows.

    The weights are left unset; `initialize_packed` makes a model to train.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, models: int, operations: Operations = TORCH) -> None:
        super().__init__()
        with torch.device("meta"):
            like = Llama(config, operations)
        self.config = config
        self.operations = operations
        self.models = models
        self.embedding = PackedEmbedding(models, config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_pack(block, models) for block in like.blocks)
        self.norm = PackedRMSNorm(models, config.width, config.norm_eps, TORCH)  # like `Llama`'s
        self.register_buffer("cos", torch.empty(like.cos.shape), persistent=False)
        self.register_buffer("sin", torch.empty(like.sin.shape), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, tables = self.hidden(tokens).unbind(), self.embedding.weight.unbind()
        return torch.stack([functional.linear(x, table) for x, table in zip(states, tables, strict=True)])

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The normalised states [N, R, T, D] that the logits are projections of."""
        cos, sin = self.cos[: tokens.shape[2]], self.sin[: tokens.shape[2]]
        x, delta = self.operations.residual(self.embedding(tokens)), None
        for block in self.blocks:
            x, delta = self.operations.run(block, x, delta, cos, sin)
        _, normed = self.norm(x, delta)
        out: torch.Tensor = normed.view(*tokens.shape, -1)
        return out

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Each model's mean cross-entropy [N] in nats a target, in float32 (float64 for float64 models).

        `loss.sum().backward()` gives every model the gradients of its own loss: no weight is in two of them.

        Logits and loss come model by model: the logits' gradient then exists for one model at a time, 22.5 GiB at most
        instead of 38 (20m, 4 x 32 rows), and compiled code computes it once: 1.84 M targets/s instead of 1.65 (H200).
        """
        each = zip(self.hidden(inputs).unbind(), self.embedding.weight.unbind(), targets.unbind(), strict=True)
        return torch.stack([self.operations.loss(x.flatten(0, 1), table, own.flatten()) for x, table, own in each])

    def worker_weights(self, worker: int) -> dict[str, torch.Tensor]:
        """One model's weights under Llama's names: views of this one's."""
        return {name: weight.detach()[worker] for name, weight in self.named_parameters()}

    def load_worker(self, worker: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Give one model the weights of a Llama. Raises KeyError where one is missing."""
        with torch.no_grad():
            for name, weight in self.worker_weights(worker).items():
                weight.copy_(weights[name])

    def workers(self, operations: Operations | None = None) -> list[Llama]:
        """The models one by one, in the same memory: what trains either trains both. Gradients are their own.

        Their operations are the pack's unless others are given.
        """
        chosen = operations or self.operations
        each = (self.worker_weights(worker) for worker in range(self.models))
        return [over(weights, self.config, self.cos, self.sin, chosen) for weights in each]

    def copy_average_to(self, model: Llama) -> None:
        """Fill `model` with the mean of the models' weights, which is what decentralised training evaluates."""
        packed = dict(self.named_parameters())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                torch.mean(packed[name], dim=0, out=weight)


def packed_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Features [N R, T, in] by each model's weight [N, out, in]: [N R, T, out]."""
    models, outputs, inputs = weight.shape
    product = torch.bmm(x.reshape(models, -1, inputs), weight.transpose(1, 2))
    return product.view(*x.shape[:-1], outputs)


def deal(rows: torch.Tensor, models: int) -> torch.Tensor:
    """A batch's rows [N R, ...] as each model's own, a view [N, R, ...]: model i has every Nth row from i on."""
    return rows.view(-1, models, *rows.shape[1:]).transpose(0, 1)


def initialize_packed(config: ModelConfig, seeds: Sequence[int], operations: Operations = TORCH) -> PackedLlama:
    """One model a seed, each with the weights that `initialize` gives a Llama of that seed. On the CPU."""
    with torch.device("meta"):
        model = PackedLlama(config, len(seeds), operations)
    model.to_empty(device="cpu")
    solos = {seed: initialize(config, seed) for seed in dict.fromkeys(seeds)}
    for worker, seed in enumerate(seeds):
        model.load_worker(worker, dict(solos[seed].named_parameters()))
    model.cos.copy_(solos[seeds[0]].cos)
    model.sin.copy_(solos[seeds[0]].sin)
    return model


def _pack(module: nn.Module, models: int) -> nn.Module:
    """The module with every layer that has weights replaced by N of them, under its own name."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(models, child.in_features, child.out_features))
        elif isinstance(child, RMSNorm):
            setattr(module, name, PackedRMSNorm(models, child.weight.shape[0], child.eps, child.operations))
        else:
            _pack(child, models)
    return module
