"""Packs on a GPU, by every kind of update, against their models alone, within the bounds of the trainer's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.train.recipe import solo_config
from tinyllm_ray.train.trainer import Trainer

pytestmark = pytest.mark.gpu

LOSS_BOUND, NORM_BOUND = 1e-3, 2e-2
UPDATES = 6
"""From the third on a CUDA graph replays."""

HOWS: list[dict[str, Any]] = [
    {"update": update, "packed_backward": way}
    for update in ("eager", "compiled", "graph")
    for way in ("at_once", "one_by_one", "processes")
    if (update, way) != ("graph", "processes")
]


@pytest.fixture(autouse=True)
def _each_on_its_own() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def cache() -> TokenCache:
    return open_cache(default_cache())


def pack(*settings: str) -> Config:
    """Four models of two layers, with 4 rows an update each."""
    size = ["model.layers=2", "execution.micro_batch_size=2", "packing.models=4"]
    return load("20m-32k", [*size, *settings])


def said_by(config: Config, cache: TokenCache) -> torch.Tensor:
    """Losses and norms of all updates, [UPDATES, 2, N]."""
    with Trainer(config, cache) as trainer:
        return torch.stack([torch.stack(trainer.step()).view(2, -1) for _ in range(UPDATES)]).cpu()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    losses, norms = (found / expected - 1).abs().unbind(1)
    assert losses.max() < LOSS_BOUND
    assert norms.max() < NORM_BOUND


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how['update']}-{how['packed_backward']}")
def test_every_model_is_its_training_alone(cache: TokenCache, how: dict[str, Any]) -> None:
    variants = "[{}, {seed: 1}, {peak_learning_rate: 0.002}, {betas: [0.8, 0.9], weight_decay: 0}]"
    config = pack("training.tokens_per_update=4096", f"packing.variants={variants}")
    alone = torch.cat([said_by(solo_config(config, model), cache) for model in range(4)], dim=2)
    assert_near(said_by(config.with_execution(how), cache), alone)


@pytest.mark.parametrize("scheme", ["awc", "atc"])
@pytest.mark.parametrize("how", HOWS[1:], ids=lambda how: f"{how['update']}-{how['packed_backward']}")
def test_models_that_are_mixed_are_the_same_by_every_kind_of_update(
    cache: TokenCache, how: dict[str, Any], scheme: str
) -> None:
    mixing = ["packing.topology=one_peer_exponential", f"packing.scheme={scheme}"]
    config = pack("training.tokens_per_update=16384", *mixing)
    assert_near(said_by(config.with_execution(how), cache), said_by(config.with_execution(HOWS[0]), cache))
