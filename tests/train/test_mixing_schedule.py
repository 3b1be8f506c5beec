"""Each update's mixing matrix, as the recipe and the update's number have it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.train.mixing import mixing_matrix, weaken
from tinyllm_ray.train.mixing_schedule import MixingSchedule
from tinyllm_ray.train.recipe import learning_rate, total_updates

MakeConfig = Callable[..., Config]
DOUBLE = torch.zeros((), dtype=torch.float64)


def mixed(tiny: MakeConfig, topology: str, models: int, **more: object) -> Config:
    return tiny(
        packing={"models": models, "topology": topology, "scheme": "awc", **more},
        training={"tokens_per_update": 16 * models, "token_budget": 16 * models * 20, "epochs": 2},
        execution={"micro_batch_size": 1},
    )


@pytest.mark.parametrize("topology", ["complete", "one_peer_ring", "one_peer_exponential"])
@pytest.mark.parametrize("models", [2, 3, 4, 5, 8])
def test_every_update_has_the_topologys_matrix(tiny: MakeConfig, topology: str, models: int) -> None:
    schedule = MixingSchedule(mixed(tiny, topology, models), DOUBLE)
    for update in [*range(12), 1_000_003]:
        assert np.array_equal(schedule(update).numpy(), mixing_matrix(topology, models, update))


@pytest.mark.parametrize("start", [0.0, 0.33, 1.0])
def test_adaptive_consensus_weakens_it_with_the_learning_rate(tiny: MakeConfig, start: float) -> None:
    config = mixed(tiny, "one_peer_exponential", 4, consensus_start_fraction=start, consensus_power=2)
    schedule, total = MixingSchedule(config, DOUBLE), total_updates(config)
    assert total == 20
    first = math.ceil(start * total)
    largest = max((learning_rate(config, update) for update in range(first, total)), default=1.0)
    for update in range(total):
        weight = 1.0 if update < first else (learning_rate(config, update) / largest) ** 2
        expected = weaken(mixing_matrix("one_peer_exponential", 4, update), weight)
        np.testing.assert_allclose(schedule(update).numpy(), expected, rtol=0, atol=1e-15)
    assert (schedule(total - 1)[0, 0] > 0.9) == (start < 1), "hardly any mixing at a tenth of the rate"


def test_past_the_last_update_consensus_stays(tiny: MakeConfig) -> None:
    config = mixed(tiny, "complete", 2, consensus_start_fraction=0.5, consensus_power=1)
    schedule = MixingSchedule(config, DOUBLE)
    assert torch.equal(schedule(500), schedule(19))


def test_it_is_in_the_weights_type(tiny: MakeConfig) -> None:
    matrix = MixingSchedule(mixed(tiny, "complete", 3), torch.zeros(1))(0)
    assert matrix.dtype == torch.float32
    assert torch.equal(matrix, torch.full((3, 3), 1 / 3))
