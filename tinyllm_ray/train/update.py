"""How one update executes: every micro-batch's forward and backward, clipping, AdamW.

`eager` runs PyTorch's operators one by one; `compiled` puts the loss of a micro-batch, and with it its backward pass,
through torch.compile.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tinyllm_ray.config import Config, identity
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.train.optimizer import clip_gradients, set_learning_rate

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CUDA_GRAPH_MODES = {"reduce-overhead", "max-autotune"}


class Statistics(NamedTuple):
    """What an update says about itself, as device tensors: reading one waits for the device."""

    loss: torch.Tensor
    """Mean over the update's targets, in nats, before the weights changed."""
    grad_norm: torch.Tensor
    """Global norm before clipping."""


class Update:
    """Runs updates of one model under one execution.

    `batch` is int64 [rows, context + 1] on the model's device; inputs and targets are its views.
    """

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._device = model.embedding.weight.device
        self._loss = build_loss(model, config, self._device)
        # The compile modes that replay CUDA graphs write gradients into memory of their own, which the next replay
        # overwrites: accumulating needs gradients that stay where they are.
        self._keep_gradients = self._device.type == "cuda" and config.execution.compile_mode in _CUDA_GRAPH_MODES
        if self._keep_gradients:
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)

    def __call__(self, batch: torch.Tensor, learning_rate: float) -> Statistics:
        config = self._config
        set_learning_rate(self._optimizer, learning_rate)
        total = torch.zeros((), device=self._device)
        with sdpa_backend(config.execution.sdpa_backend):
            for rows in torch.split(batch, config.micro_batch_size):
                if self._keep_gradients:
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                loss = self._loss(rows[:, :-1], rows[:, 1:]) / config.accumulation
                torch.autograd.backward(loss)
                total = total + loss.detach()  # not in place: a float64 model's loss stays float64
        norm = clip_gradients(self._model.parameters(), config.optimizer.gradient_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._keep_gradients)
        return Statistics(total, norm)


def build_loss(model: Llama, config: Config, device: torch.device) -> Loss:
    """The loss of one micro-batch, in bf16 autocast on CUDA, compiled where the execution says so."""
    inner: Loss = model.loss
    if config.execution.update == "compiled":
        tag_compile_cache(config)
        inner = torch.compile(model.loss, mode=config.execution.compile_mode, dynamic=False, fullgraph=True)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Around the compiled function: an autocast block inside it bypasses PyTorch's cache of differentiated graphs,
        # so that every process traces them anew (pytorch/pytorch#191106).
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return inner(inputs, targets)

    return loss


def tag_compile_cache(config: Config) -> None:
    """Keep this execution's graphs apart from others' in the compile cache.

    PyTorch's cache key does not hold the SDPA backend: over a shared cache, `efficient` was seen to run cuDNN's
    kernels (1.90 M targets/s against its own 1.52 M, one H200). The tag is part of every key; threads and read-ahead
    change no graph and are left out.
    """
    execution = config.execution
    compiled = {"compile_mode": execution.compile_mode, "sdpa_backend": execution.sdpa_backend}
    torch.compiler.config.cache_key_tag = identity(compiled)[:16]
