"""Which mixing matrix each update of a recipe has, on the device that mixes."""

import numpy as np
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.train.mixing import consensus_weights, mixing_matrix, mixing_period
from tinyllm_ray.train.recipe import learning_rate, total_updates


class MixingSchedule:
    """W of any update of a mixed recipe, [N, N] like `weight` in dtype and device; nothing waits for the device.

    It is a function of the update's number alone, so that a resumed run mixes as the unbroken one does.
    """

    def __init__(self, config: Config, weight: torch.Tensor) -> None:
        packing = config.packing
        assert packing.topology is not None
        period = mixing_period(packing.topology, packing.models)
        matrices = np.stack([mixing_matrix(packing.topology, packing.models, update) for update in range(period)])
        self._whole = torch.from_numpy(matrices).to(weight.device)
        self._own = torch.eye(packing.models, dtype=torch.float64, device=weight.device)
        self._dtype = weight.dtype
        self._consensus = _consensus(config)

    def __call__(self, update: int) -> torch.Tensor:
        """W of update `update` (0-based), weakened where the recipe's consensus is adaptive."""
        matrix = self._whole[update % len(self._whole)]
        weight = self._consensus[min(update, len(self._consensus) - 1)]
        return torch.lerp(self._own, matrix, weight).to(self._dtype)


def _consensus(config: Config) -> list[float]:
    """g of each update; past the last one it stays. A single one where consensus is not adaptive."""
    start, power = config.packing.consensus_start_fraction, config.packing.consensus_power
    if start is None or power is None:
        return [1.0]
    rates = [learning_rate(config, update) for update in range(total_updates(config))]
    return consensus_weights(rates, start, power)
