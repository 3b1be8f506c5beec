"""The smallest configuration that has everything: two layers, four heads, eight rows an update."""

import copy
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_caches import write_cache

from tinyllm_ray.config import Config, validate
from tinyllm_ray.data.cache import TokenCache

_TINY: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn": 48, "context": 16, "vocab_size": 61, "init_std": 0.1},
    "optimizer": {"peak_learning_rate": 0.01, "betas": [0.9, 0.95]},
    "training": {"tokens_per_update": 128, "token_budget": 12_800, "epochs": 4},
    "evaluation": {"subset_blocks": 8},
    "execution": {"micro_batch_size": 4, "cpu_threads": 1},
}

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="session")
def tiny() -> MakeConfig:
    """`tiny(training={"epochs": 2})`: the tiny configuration with sections' settings changed."""

    def make(**sections: dict[str, Any]) -> Config:
        values = copy.deepcopy(_TINY)
        for section, settings in sections.items():
            values.setdefault(section, {}).update(settings)
        return validate(values, "test")

    return make


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Tokens of which each follows from the one before, but for one in eight: soon learned, and seldom all."""
    generator = np.random.default_rng(0)
    splits = {"train": [0] * 6000, "validation": [0] * 1000}
    for tokens in splits.values():
        for at in range(1, len(tokens)):
            surprise = generator.random() < 1 / 8
            tokens[at] = int(generator.integers(61)) if surprise else (3 * tokens[at - 1] + 1) % 61
    return write_cache(tmp_path_factory.mktemp("cache"), splits, shard_tokens=1000, vocab_size=61)


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where torch.compile has nothing to compile its CPU kernels with."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler found")
