"""A model in flat buffers whose gradients are the test's."""

import torch
from flat_kernels import DEVICE
from torch import nn

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.flat_buffers import FlatBuffers
from tinyllm_ray.train.flat_optimizer import FlatAdamW
from tinyllm_ray.train.optimizer import set_learning_rate

ODD = {"layers": 1, "width": 10, "heads": 1, "ffn": 7, "vocab_size": 821}
"""No weight is a whole number of blocks, and the embedding has three."""


class Flat:
    """A model in flat buffers with its optimizer, fed with gradients of the test's."""

    def __init__(
        self,
        config: Config,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        self.model = initialize(config.model, seed).to(DEVICE, dtype)
        self.buffers = FlatBuffers(self.model, compute or dtype, micro_batches)
        self.optimizer = FlatAdamW(self.buffers, config.optimizer, micro_batches)

    def step(self, parts: list[dict[str, torch.Tensor]], rate: float = 0.01) -> torch.Tensor:
        """One update on the gradients of each micro-batch, by name; loss and norm."""
        self.optimizer.take_up_loaded()
        set_learning_rate(self.optimizer, rate)
        names = zip(self.buffers.weights, self.buffers.twin_weights, strict=True)
        dtypes = {name: weight.dtype for name, weight in names}
        for number, part in enumerate(parts):
            gradients = [part[name].to(dtype) for name, dtype in dtypes.items()]
            self.optimizer.collect(torch.tensor(1.0, device=DEVICE), gradients, first=number == 0)
        said = self.optimizer.settle()
        self.optimizer.step()
        return said


def drawn(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        for name, weight in model.named_parameters()
    }
