"""Weights are found wherever they lie, and one of packed models by its folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_states import CACHE, PackedTraining, Training
from safetensors import safe_open

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, allocate
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.export import export_run
from tinyllm_ray.train.manifest import DamagedError
from tinyllm_ray.train.weights import load_weights
from tinyllm_ray.train.weights_source import open_weights

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def trained(config: Config) -> PackedTraining:
    return PackedTraining(config)


@pytest.fixture
def save(trained: PackedTraining, config: Config, tmp_path: Path) -> Callable[[bool], Path]:
    """Saves step 5 of the run `tmp_path`, with an average or without."""

    def save(average: bool) -> Path:
        progress = {"step": 5}
        return save_checkpoint(tmp_path, 5, trained.model, trained.optimizer, progress, config, CACHE, average=average)

    return save


def loaded(source: Path) -> Llama:
    found = open_weights(source)
    model = allocate(found.model)
    load_weights(model, found.weights)
    return model


def same(one: Llama, other: Llama) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_run_of_a_lone_model(config: Config, tmp_path: Path) -> None:
    alone = Training(config)
    path = save_checkpoint(tmp_path, 4, alone.model, None, {}, config, CACHE)
    for source in (tmp_path, path.parent, path):
        found = open_weights(source)
        assert (found.weights, found.step, found.cache_identity) == (path / "model.safetensors", 4, CACHE)
        assert found.configuration == config.model_dump(mode="json")
    assert open_weights(path / "model.safetensors").configuration == {}


def test_a_run_of_mixed_models_stands_for_their_average(
    save: Callable[[bool], Path], trained: PackedTraining, tmp_path: Path
) -> None:
    path = save(True)
    average = allocate(trained.config.model)
    assert isinstance(trained.model, PackedLlama)
    trained.model.copy_average_to(average)
    for source in (tmp_path, path):
        assert same(loaded(source), average)


@pytest.mark.parametrize("average", [True, False])
def test_a_workers_folder_stands_for_that_worker(
    save: Callable[[bool], Path], trained: PackedTraining, config: Config, average: bool
) -> None:
    path = save(average)
    assert isinstance(trained.model, PackedLlama)
    for number, worker in enumerate(trained.model.workers()):
        assert same(loaded(path / f"workers/{number:02d}"), worker)
    found = open_weights(path / "workers/1")
    assert found.weights == path / "workers/01/model.safetensors"
    assert (found.configuration, found.step) == (config.model_dump(mode="json"), 5)
    assert (found.cache_identity, found.origin) == (CACHE, str(path))


def test_of_models_that_were_not_mixed_one_has_to_be_named(save: Callable[[bool], Path], tmp_path: Path) -> None:
    path = save(False)
    for source in (tmp_path, path):
        with pytest.raises(ConfigError, match="has no average of its models, which were not mixed") as error:
            open_weights(source)
        assert str(error.value).endswith(f"choose one of its 3 workers, {path}/workers/00 to {path}/workers/02")
        assert "\n" not in str(error.value)


def test_a_worker_that_is_not_there_is_told_with_those_that_are(save: Callable[[bool], Path]) -> None:
    path = save(True)
    with pytest.raises(ConfigError, match=f"{path}: has no worker 3; choose one of its 3 workers"):
        open_weights(path / "workers/03")
    with pytest.raises(ConfigError):
        open_weights(path / "workers/best")


def test_a_worker_of_a_damaged_checkpoint_is_not_taken(save: Callable[[bool], Path]) -> None:
    path = save(False)
    (path / "workers/02/training.pt").unlink()
    with pytest.raises(DamagedError, match=r"workers/02/training\.pt: cannot be read"):
        open_weights(path / "workers/00")


def test_a_worker_can_be_exported(save: Callable[[bool], Path], trained: PackedTraining, tmp_path: Path) -> None:
    export_run(save(False) / "workers/02", tmp_path / "exported")
    assert isinstance(trained.model, PackedLlama)
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as file:
        table = file.get_tensor("model.embed_tokens.weight")
    assert torch.equal(table, trained.model.worker_weights(2)["embedding.weight"])
