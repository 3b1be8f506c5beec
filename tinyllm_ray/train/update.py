"""How one update executes: every micro-batch's forward and backward, the guard against faults, clipping, AdamW.

`eager` runs PyTorch's operators one by one; `compiled` puts the loss of a micro-batch, and with it its backward pass,
through torch.compile; `graph` does so too, and replays the whole update as one CUDA graph (graph_update.py). For that
every kind of update has two parts: the host's, which writes an update's settings into device tensors that stay where
they are, and `run`, all device work, which reads nothing on the host.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from tinyllm_ray.config import Config, identity
from tinyllm_ray.execution import CUDA_GRAPH_MODES, HOST_KEYS
from tinyllm_ray.model import attention
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.train.optimizer import clip_gradients, set_learning_rate, skip_steps_where

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Statistics(NamedTuple):
    """What an update says about itself, as device tensors: reading one waits for the device.

    Scalars of one model, [N] of packed ones. Where loss or norm is not finite the update changed nothing, and neither
    did any update after it, whose loss is nan whatever their rows.
    """

    loss: torch.Tensor
    """Mean over the update's targets, in nats, before the weights changed."""
    grad_norm: torch.Tensor
    """Global norm before clipping."""


class Update:
    """Runs updates of one model under one execution.

    `batch` is int64 [rows, context + 1] on the model's device, all rows of an update; inputs and targets are its views.
    A batch of another shape raises ValueError, and whatever else would have a compiled loss traced a second time raises
    RuntimeError: a retracing costs seconds and, past Dynamo's limit, ends in code that is not the one measured.

    From the first update whose loss or gradient norm is not finite, weights, moments and step counters stay as they
    were before it. The guard lives on the device, so that nothing waits for it.
    """

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._device = model.embedding.weight.device
        self._loss = traced_once(build_loss(model, config, self._device), config)
        self._fault = torch.zeros((), device=self._device)
        """0, and nan from the first fault on."""
        self.stopped = torch.zeros((), device=self._device)
        """On the device: 0.0, and 1.0 from the first fault on."""
        skip_steps_where(optimizer, self.stopped)
        # The compile modes that replay CUDA graphs write gradients into memory of their own, which the next replay
        # overwrites: accumulating needs gradients that stay where they are.
        self._keep_gradients = self._device.type == "cuda" and config.execution.compile_mode in CUDA_GRAPH_MODES
        if self._keep_gradients:
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)

    def __call__(self, batch: torch.Tensor, learning_rate: float) -> Statistics:
        check_batch(batch, self._config)
        self.prepare(learning_rate)
        return self.run(batch)

    def prepare(self, learning_rate: float) -> None:
        """The host's part of an update: settle its rate."""
        set_learning_rate(self._optimizer, learning_rate)

    def run(self, batch: torch.Tensor) -> Statistics:
        """The device's part, at the learning rate that was settled last.

        Whatever lives longer than the update stays where it is in memory; gradients are gone at its end, so that those
        of a captured one lie in the graph's own pool.
        """
        config = self._config
        total = self._fault
        with sdpa_backend(config.execution.sdpa_backend):
            for rows in torch.split(batch, config.micro_batch_size):
                if self._keep_gradients:
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                loss = self._loss(rows[:, :-1], rows[:, 1:]) / config.accumulation
                torch.autograd.backward(loss)
                total = total + loss.detach()  # not in place: a float64 model's loss stays float64
        norm = clip_gradients(self._model.parameters(), config.optimizer.gradient_clip)
        self._guard(total, norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self._keep_gradients)
        return Statistics(total, norm)

    def _guard(self, total: torch.Tensor, norm: torch.Tensor) -> None:
        """Stop for good where one of the two is not finite: 0 * x is 0 for every finite x, however large, else nan.

        The next total begins with the fault, which is how it stays.
        """
        torch.mul(total * 0, norm, out=self._fault)
        torch.ne(self._fault, 0, out=self.stopped)


def check_batch(batch: torch.Tensor, config: Config) -> None:
    """Raises ValueError where `batch` is not all rows of an update, all models'."""
    if batch.shape != (config.batch_rows, config.model.context + 1):
        raise ValueError(
            f"a batch of shape {tuple(batch.shape)} is no update of {config.batch_rows} rows of "
            f"{config.model.context} + 1 tokens"
        )


def build_loss(model: Llama | PackedLlama, config: Config, device: torch.device) -> Loss:
    """The loss of one micro-batch, in bf16 autocast on CUDA, compiled where the execution says so.

    Compiled whole or not at all (fullgraph): what cannot be traced, and one retracing more than Dynamo's
    `recompile_limit`, raises where PyTorch would otherwise run the code eagerly from then on.
    """
    attention.prepare(config.execution.sdpa_backend, config.model.context, device)
    inner: Loss = model.loss
    tag = ""
    if config.execution.update != "eager":
        tag = tag_compile_cache(config)
        inner = torch.compile(model.loss, mode=config.execution.compile_mode, dynamic=False, fullgraph=True)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if tag:  # every time: what is traced in this call, and in its backward pass, must not go by another loss's tag
            torch.compiler.config.cache_key_tag = tag
        # Around the compiled function: an autocast block inside it bypasses PyTorch's cache of differentiated graphs,
        # so that every process traces them anew (pytorch/pytorch#191106).
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return inner(inputs, targets)

    return loss


def traced_once(loss: Loss, config: Config) -> Loss:
    """`loss` where a compiled one is traced in its first call alone: what would trace it again raises RuntimeError."""
    if config.execution.update == "eager":
        return loss
    traced = False

    def guarded(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal traced
        stance: AbstractContextManager[None] = nullcontext()
        if traced:
            stance = torch.compiler.set_stance("fail_on_recompile")
        with stance:
            found = loss(inputs, targets)
        traced = True
        return found

    return guarded


def tag_compile_cache(config: Config) -> str:
    """Keep this execution's graphs apart from others' in the compile cache; the tag by which they are.

    PyTorch's cache key does not hold the SDPA backend: over a shared cache, `efficient` was seen to run cuDNN's
    kernels (1.90 M targets/s against its own 1.52 M, one H200). The tag is part of every key; threads and read-ahead
    change no graph and are left out.
    """
    # A graph replays what `compiled` compiles, and rows are in the shapes, which the key holds.
    compiled = config.execution.model_dump(exclude={*HOST_KEYS, "update", "micro_batch_size", "packed_backward"})
    if config.packing.models > 1:
        compiled["packed_backward"] = config.packed_backward
    torch.compiler.config.cache_key_tag = tag = identity(compiled)[:16]
    return tag
