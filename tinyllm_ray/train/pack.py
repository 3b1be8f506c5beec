"""N models of a recipe as the trainer steps them: what each starts from, learns with and mixes with."""

import os
from typing import TYPE_CHECKING

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.model.llama import Llama, allocate
from tinyllm_ray.model.operations import TORCH, operations_of
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.records import Memory
from tinyllm_ray.train.graph_update import build_run
from tinyllm_ray.train.mixing import consensus_distance
from tinyllm_ray.train.mixing_schedule import MixingSchedule
from tinyllm_ray.train.optimizer import set_learning_rate
from tinyllm_ray.train.packed_backward import AtOnce, Backward, OneByOne
from tinyllm_ray.train.packed_optimizer import build_packed_optimizer
from tinyllm_ray.train.packed_update import PackedUpdate
from tinyllm_ray.train.recipe import learning_rate, solo_config
from tinyllm_ray.train.update import Loss, Statistics, build_loss, check_batch, traced_once

if TYPE_CHECKING:
    from tinyllm_ray.train.packed_processes import Processes


_BYTES_A_WEIGHT = 16
"""In float32: the weight, its gradient, two moments."""


class Pack:
    """Models that train side by side: a decentralised training where they are mixed, else N trainings apart.

    Raises ConfigError where the device cannot hold what all of them train with. Close it after use.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        packing = config.packing
        check_memory(config, memory_bytes(device))
        self._config, self._device = config, device
        self._alone = [] if packing.mixed else [solo_config(config, worker) for worker in range(packing.models)]
        """What each model is trained as, where none are mixed."""
        self.model = initialize_packed(config.model, model_seeds(config), operations_of(config.execution)).to(device)
        settings = [alone.optimizer for alone in self._alone] or [config.optimizer]
        self.optimizer = build_packed_optimizer(self.model.parameters(), *settings)
        self._matrix = MixingSchedule(config, self.model.embedding.weight) if packing.mixed else None
        self._processes: Processes | None = None
        """Where each model passes backward in one of its own."""
        self._update = PackedUpdate(
            self.model,
            self.optimizer,
            self._build_backward(),
            gradient_clip=config.optimizer.gradient_clip,
            scheme=packing.scheme,
            backend=config.execution.sdpa_backend,
        )
        self.run = build_run(self._update.run, config, device)
        self._evaluated: list[Llama] = []

    def step(self, batch: torch.Tensor, update: int) -> Statistics:
        """Update `update` (0-based) on rows [N R, context + 1] of whole numbers, row j N + i being model i's j-th.

        Raises ValueError for a batch of another shape.
        """
        check_batch(batch, self._config)
        self._set_learning_rates(update)
        if self._matrix is not None:
            self._update.mix_by(self._matrix(update))
        return self.run(batch)

    def evaluation_models(self) -> list[Llama]:
        """The average of the models where they are mixed, filled anew by each call; else each one, in its own memory.

        The same objects every time, so that what is compiled of them stays so.
        """
        if not self._config.packing.mixed:
            self._evaluated = self._evaluated or self.model.workers(TORCH)
            return self._evaluated
        if not self._evaluated:
            self._evaluated = [allocate(self._config.model).to(self.model.embedding.weight)]
            self._evaluated[0].cos, self._evaluated[0].sin = self.model.cos, self.model.sin
        self.model.copy_average_to(self._evaluated[0])
        return self._evaluated

    def consensus_distance(self) -> float | None:
        """How far apart models that are mixed are, as `mixing` defines it; None of others. Waits for the device."""
        if not self._config.packing.mixed:
            return None
        (average,) = self.evaluation_models()
        return float(consensus_distance(self.model.parameters(), average.parameters()))

    def peak_memory(self) -> Memory:
        """Of this process, and of those that models have of their own."""
        own = peak_memory(self._device)
        return own if self._processes is None else self._processes.add_peaks(own)

    def close(self) -> None:
        """End the processes that models have of their own."""
        if self._processes is not None:
            self._processes.close()

    def _build_backward(self) -> Backward:
        config = self._config
        if config.packed_backward == "processes":
            from tinyllm_ray.train.packed_processes import Processes  # others have no use for it

            self._processes = Processes(self.model, config)
            return self._processes

        def build(model: Llama | PackedLlama) -> Loss:
            return traced_once(build_loss(model, config, self._device), config)

        if config.packed_backward == "one_by_one":
            return OneByOne(self.model, build, config.micro_batch_size)
        return AtOnce(build(self.model), config.micro_batch_size)

    def _set_learning_rates(self, update: int) -> None:
        """Each model's by its own peak; scalars travel with the kernels that write them, so nothing waits."""
        if len({alone.optimizer.peak_learning_rate for alone in self._alone}) <= 1:
            # One kernel instead of N. The recipe's own peak need not be that of its variants.
            set_learning_rate(self.optimizer, learning_rate((self._alone or [self._config])[0], update))
            return
        rates = [learning_rate(alone, update) for alone in self._alone]
        for group in self.optimizer.param_groups:
            for own, rate in zip(group["lr"], rates, strict=True):
                own.fill_(rate)


def model_seeds(config: Config) -> list[int]:
    """The seed of each model's weights, and of its order of rows where models are not mixed."""
    return [config.training.seed if own.seed is None else own.seed for own in config.packing.each]


def check_memory(config: Config, total_bytes: int) -> None:
    """Raises ConfigError where the models alone, before any activation, are larger than a device of `total_bytes`."""
    models, each = config.packing.models, _BYTES_A_WEIGHT * config.model.parameters
    if models * each > total_bytes:
        raise ConfigError(
            f"packing.models {models}: their weights, gradients and moments are {models * each / 1e9:.1f} GB, the "
            f"device has {total_bytes / 1e9:.1f} GB; take {max(1, total_bytes // each)} or fewer"
        )


def memory_bytes(device: torch.device) -> int:
    """All memory of the device; of the host, where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
