"""N models of a recipe as the trainer steps them: what each starts from, learns with and mixes with."""

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, allocate
from tinyllm_ray.model.operations import TORCH, operations_of
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.train.mixing_schedule import MixingSchedule
from tinyllm_ray.train.optimizer import set_learning_rate
from tinyllm_ray.train.packed_backward import AtOnce, Backward, OneByOne
from tinyllm_ray.train.packed_optimizer import build_packed_optimizer
from tinyllm_ray.train.packed_update import PackedUpdate
from tinyllm_ray.train.recipe import learning_rate, solo_config
from tinyllm_ray.train.update import Loss, Statistics, build_loss, check_batch, traced_once


class Pack:
    """Models that train side by side: a decentralised training where they are mixed, else N trainings apart."""

    def __init__(self, config: Config, device: torch.device) -> None:
        packing = config.packing
        self._config, self._device = config, device
        self._alone = [] if packing.mixed else [solo_config(config, worker) for worker in range(packing.models)]
        """What each model is trained as, where none are mixed."""
        self.model = initialize_packed(config.model, model_seeds(config), operations_of(config.execution)).to(device)
        settings = [alone.optimizer for alone in self._alone] or [config.optimizer]
        self.optimizer = build_packed_optimizer(self.model.parameters(), *settings)
        self._matrix = MixingSchedule(config, self.model.embedding.weight) if packing.mixed else None
        self._update = PackedUpdate(
            self.model,
            self.optimizer,
            self._build_backward(),
            gradient_clip=config.optimizer.gradient_clip,
            scheme=packing.scheme,
            backend=config.execution.sdpa_backend,
        )
        self._evaluated: list[Llama] = []

    def step(self, batch: torch.Tensor, update: int) -> Statistics:
        """Update `update` (0-based) on int64 rows [N R, context + 1], row j N + i being model i's j-th.

        Raises ValueError for a batch of another shape.
        """
        check_batch(batch, self._config)
        self._set_learning_rates(update)
        return self._update(batch, None if self._matrix is None else self._matrix(update))

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

    def _build_backward(self) -> Backward:
        config = self._config

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
