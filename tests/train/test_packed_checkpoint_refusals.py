"""Packed models are not filled from a checkpoint of others, and stay as they are then."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import CACHE, PackedTraining, Training, equal

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint, open_checkpoint
from tinyllm_ray.train.checkpoints import save_checkpoint

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def apart(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three models that are not mixed, which no test changes."""
    trained, run = PackedTraining(config), tmp_path_factory.mktemp("apart")
    return save_checkpoint(run, 3, trained.model, trained.optimizer, {}, config, CACHE)


@pytest.fixture(scope="module")
def alone(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a lone model, which no test changes."""
    training = Training(config)
    run = tmp_path_factory.mktemp("alone")
    return save_checkpoint(run, 3, training.model, training.optimizer, {}, config, CACHE)


@pytest.fixture
def copy(apart: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(apart, tmp_path / apart.name))


def refused(call: Callable[[], Any]) -> str:
    """The message of a ConfigError, which is one line."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def check_refused(checkpoint: Checkpoint, other: Training, message: str, *, weights: bool = True) -> None:
    before, moments, random = other.weights(), other.moments(), torch.get_rng_state()
    if weights:
        assert message in refused(lambda: checkpoint.load_weights(other.model))
    assert message in refused(lambda: checkpoint.load_training(other.model, other.optimizer))
    assert equal(other.weights(), before)
    assert equal(other.moments(), moments)
    assert torch.equal(torch.get_rng_state(), random)


def test_another_number_of_models_is_refused_and_changes_nothing(apart: Path, alone: Path, config: Config) -> None:
    two = PackedTraining(config, seed=8, models=2)
    check_refused(open_checkpoint(apart), two, "holds 3 packed models, asked for 2 packed models; choose")
    check_refused(open_checkpoint(alone), two, "holds a lone model, asked for 2 packed models; choose")


def test_a_lone_model_does_not_go_on_from_packed_ones(apart: Path, config: Config) -> None:
    message = "holds 3 packed models, asked for a lone model"
    check_refused(open_checkpoint(apart), Training(config, seed=8), message, weights=False)


@pytest.mark.parametrize("change", [{"layers": 1}, {"ffn": 40}, {"vocab_size": 60}])
def test_models_of_another_shape_are_refused_and_nothing_changed(
    apart: Path, tiny: MakeConfig, change: dict[str, int]
) -> None:
    other = PackedTraining(tiny(model=change), seed=8)
    check_refused(open_checkpoint(apart), other, "holds another model")


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
def test_even_the_last_worker_is_looked_at_before_the_first_is_filled(
    apart: Path, copy: Path, tiny: MakeConfig, config: Config, name: str
) -> None:
    odd = PackedTraining(tiny(model={"ffn": 40}), models=1)
    path = save_checkpoint(copy.parent, 9, odd.model, odd.optimizer, {}, config, CACHE)
    shutil.copy(path / "workers/00" / name, copy / "workers/02" / name)
    checkpoint, other = Checkpoint(copy, open_checkpoint(apart).manifest), PackedTraining(config, seed=8)
    before, moments = other.weights(), other.moments()
    if name == "training.pt":
        message = refused(lambda: checkpoint.load_training(other.model, other.optimizer))
    else:
        message = refused(lambda: checkpoint.load_weights(other.model))
    assert message.startswith(f"{copy}/workers/02/{name}: holds another model")
    assert equal(other.weights(), before)
    assert equal(other.moments(), moments)


def test_a_moment_that_one_worker_lacks_is_refused(apart: Path, copy: Path, config: Config) -> None:
    path = copy / "workers/02/training.pt"
    stored = torch.load(path, weights_only=True)
    del stored["optimizer"]["norm.weight"]["exp_avg"]
    torch.save(stored, path)
    checkpoint = Checkpoint(copy, open_checkpoint(apart).manifest)
    check_refused(checkpoint, PackedTraining(config, seed=8), "of norm.weight is [", weights=False)
