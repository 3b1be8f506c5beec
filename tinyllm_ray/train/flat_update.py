"""How one update of a model in flat buffers executes: the twin's gradients, then three kernels for everything else."""

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.execution import CUDA_GRAPH_MODES
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.train.flat_buffers import FlatBuffers
from tinyllm_ray.train.flat_optimizer import FlatAdamW
from tinyllm_ray.train.optimizer import set_learning_rate
from tinyllm_ray.train.update import Statistics, build_loss, check_batch, traced_once


class FlatUpdate:
    """Runs updates of one model under one execution, as `Update` does, batches, faults and statistics alike.

    Puts the weights of `model` into flat buffers and makes the optimizer over them; `model` stays what checkpoints,
    evaluation and export read. Its parameters are others than before: build nothing on them earlier.
    """

    def __init__(self, model: Llama, config: Config) -> None:
        self._config = config
        weight = model.embedding.weight
        device, dtype = weight.device, weight.dtype
        # On a CPU, where nothing is cast, the shadows are the weights' equals.
        self.buffers = FlatBuffers(model, torch.bfloat16 if device.type == "cuda" else dtype, config.accumulation)
        self.optimizer = FlatAdamW(self.buffers, config.optimizer, config.accumulation)
        # Autocast stays around the loss and casts activations where it did before; weights have their dtype.
        self._loss = traced_once(build_loss(self.buffers.twin, config, device), config)
        self._share = torch.full((), 1 / config.accumulation, dtype=dtype, device=device)
        """Of a micro-batch's loss in the update's: the gradients' start, instead of kernels that divide the loss."""
        self._replays = device.type == "cuda" and config.execution.compile_mode in CUDA_GRAPH_MODES

    @property
    def stopped(self) -> torch.Tensor:
        """On the device: 0.0, and 1.0 from the first fault on."""
        return self.optimizer.stopped

    def __call__(self, batch: torch.Tensor, learning_rate: float) -> Statistics:
        check_batch(batch, self._config)
        self.prepare(learning_rate)
        return self.run(batch)

    def prepare(self, learning_rate: float) -> None:
        """The host's part of an update: its rate, and the shadows of weights that were loaded since the last one."""
        self.optimizer.take_up_loaded()
        set_learning_rate(self.optimizer, learning_rate)

    def run(self, batch: torch.Tensor) -> Statistics:
        """The device's part, on int64 rows [rows, context + 1]; the host reads nothing."""
        config = self._config
        with sdpa_backend(config.execution.sdpa_backend):
            for number, rows in enumerate(torch.split(batch, config.micro_batch_size)):
                self._collect(rows, first=number == 0)
        loss, norm = self.optimizer.settle().unbind()
        self.optimizer.step()
        return Statistics(loss, norm)

    def _collect(self, rows: torch.Tensor, *, first: bool) -> None:
        """A micro-batch; nothing of it is kept, as compile modes that replay CUDA graphs want it before the next."""
        if self._replays:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = self._loss(rows[:, :-1], rows[:, 1:])
        gradients = torch.autograd.grad(loss, self.buffers.twin_weights, self._share)
        self.optimizer.collect(loss.detach(), gradients, first=first)
