"""A packed model's checkpoint: every worker comes back, alone or with the others, and none may be missing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import CACHE, PackedTraining, Training, equal

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, allocate
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.packed_optimizer import PackedAdamW
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]

PROGRESS = {"step": 3, "best": [None, 5.5]}
WORKERS = ("workers/00", "workers/01", "workers/02")
FILES = ("checkpoint.json", "training.pt", *(f"{w}/{n}" for w in WORKERS for n in ("model.safetensors", "training.pt")))


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def trained(config: Config) -> PackedTraining:
    return PackedTraining(config)


@pytest.fixture(scope="module")
def apart(trained: PackedTraining, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of models that are not mixed, which no test changes."""
    run = tmp_path_factory.mktemp("apart")
    return save_checkpoint(run, 3, trained.model, trained.optimizer, PROGRESS, config, CACHE)


@pytest.fixture(scope="module")
def mixed(trained: PackedTraining, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of models that are mixed, which no test changes."""
    run = tmp_path_factory.mktemp("mixed")
    return save_checkpoint(run, 3, trained.model, trained.optimizer, PROGRESS, config, CACHE, average=True)


@pytest.fixture
def copy(apart: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(apart, tmp_path / apart.name))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def refused(call: Callable[[], Any]) -> str:
    """The message of a ConfigError, which is one line."""
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


class TestRoundTrip:
    def test_every_models_weights_moments_steps_and_flags_come_back_bit_for_bit(
        self, apart: Path, trained: PackedTraining, config: Config
    ) -> None:
        other = PackedTraining(config, updates=1, seed=20)
        checkpoint = open_checkpoint(apart)
        checkpoint.load_weights(other.model)
        assert checkpoint.load_training(other.model, other.optimizer) == PROGRESS
        assert equal(other.weights(), trained.weights())
        assert equal(other.moments(), trained.moments())
        assert isinstance(other.optimizer, PackedAdamW)
        assert other.optimizer.stopped.tolist() == [False, True, False]
        assert other.moments()["embedding.weight step"].tolist() == [3, 1, 3]

    def test_the_tensors_that_updates_read_stay_and_are_shared_by_all_weights(
        self, apart: Path, config: Config
    ) -> None:
        other = PackedTraining(config, updates=2, seed=4)
        optimizer = other.optimizer
        assert isinstance(optimizer, PackedAdamW)

        def held() -> list[torch.Tensor]:
            settings = [value for group in optimizer.param_groups for value in group.values()]
            tensors = [value for value in settings if isinstance(value, torch.Tensor)]
            states = [value for state in optimizer.state.values() for value in state.values()]
            return [*tensors, *states, *other.model.parameters(), optimizer.stopped]

        before, memory = held(), [tensor.data_ptr() for tensor in held()]
        checkpoint = open_checkpoint(apart)
        checkpoint.load_weights(other.model)
        checkpoint.load_training(other.model, optimizer)
        assert len(held()) == len(before)
        assert all(one is other for one, other in zip(held(), before, strict=True))
        assert [tensor.data_ptr() for tensor in held()] == memory
        assert all(state["stopped"] is optimizer.stopped for state in optimizer.state.values())
        assert len({id(state["step"]) for state in optimizer.state.values()}) == 1

    def test_what_was_restored_goes_on_like_the_one_that_was_saved(self, config: Config, tmp_path: Path) -> None:
        unbroken, resumed = PackedTraining(config), PackedTraining(config, updates=0, seed=9)
        torch.manual_seed(11)
        save_checkpoint(tmp_path, 3, unbroken.model, unbroken.optimizer, {}, config, CACHE)
        expected = torch.rand(5)
        checkpoint = find_checkpoint(tmp_path)
        checkpoint.load_weights(resumed.model)
        checkpoint.load_training(resumed.model, resumed.optimizer)
        assert torch.equal(torch.rand(5), expected)
        resumed.updates = unbroken.updates
        for _ in range(3):
            unbroken.update()
            resumed.update()
        assert equal(resumed.weights(), unbroken.weights())
        assert equal(resumed.moments(), unbroken.moments())

    def test_saving_changes_nothing_of_the_training(self, config: Config, tmp_path: Path) -> None:
        training = PackedTraining(config)
        weights, moments = training.weights(), training.moments()
        save_checkpoint(tmp_path, 3, training.model, training.optimizer, {}, config, CACHE, average=True)
        assert equal(training.weights(), weights)
        assert equal(training.moments(), moments)

    def test_what_was_restored_is_no_view_of_the_files(self, copy: Path, config: Config) -> None:
        other = PackedTraining(config, updates=0)
        checkpoint = open_checkpoint(copy)
        checkpoint.load_weights(other.model)
        checkpoint.load_training(other.model, other.optimizer)
        weights, moments = other.weights(), other.moments()
        for name in FILES:
            with (copy / name).open("r+b") as file:  # in place: a mapping of the file would show it
                file.write(b"\xff" * (copy / name).stat().st_size)
        assert equal(other.weights(), weights)
        assert equal(other.moments(), moments)

    def test_a_compiled_models_checkpoint_is_the_same(
        self, config: Config, trained: PackedTraining, apart: Path, tmp_path: Path
    ) -> None:
        compiled, other = torch.compile(trained.model), PackedTraining(config, updates=0, seed=5)
        save_checkpoint(tmp_path, 3, compiled, trained.optimizer, PROGRESS, config, CACHE)
        saved, before = find_checkpoint(tmp_path).manifest.files, open_checkpoint(apart).manifest.files
        assert saved.keys() == before.keys()
        assert all(saved[name] == before[name] for name in saved if name.startswith("workers"))
        find_checkpoint(tmp_path).load_weights(torch.compile(other.model))
        find_checkpoint(tmp_path).load_training(torch.compile(other.model), other.optimizer)
        assert equal(other.weights(), trained.weights())
        assert equal(other.moments(), trained.moments())

    def test_a_pack_of_one_is_a_pack(self, config: Config, tmp_path: Path) -> None:
        one, other = PackedTraining(config, models=1), PackedTraining(config, updates=0, seed=5, models=1)
        path = save_checkpoint(tmp_path, 3, one.model, one.optimizer, {}, config, CACHE)
        assert open_checkpoint(path).workers == 1
        open_checkpoint(path).load_weights(other.model)
        open_checkpoint(path).load_training(other.model, other.optimizer)
        assert equal(other.weights(), one.weights())
        assert equal(other.moments(), one.moments())


class TestLayout:
    def test_each_worker_has_a_folder_and_only_mixed_models_an_average(self, apart: Path, mixed: Path) -> None:
        assert files_of(apart) == sorted(FILES)
        assert files_of(mixed) == sorted((*FILES, "model.safetensors"))
        assert open_checkpoint(apart).manifest.files.keys() == {*FILES[1:]}

    def test_weights_alone(self, trained: PackedTraining, config: Config, tmp_path: Path) -> None:
        path = save_checkpoint(tmp_path, 3, trained.model, None, {}, config, CACHE, average=True)
        names = ["checkpoint.json", "model.safetensors", *(f"{worker}/model.safetensors" for worker in WORKERS)]
        assert files_of(path) == names
        other = PackedTraining(config, updates=0, seed=7)
        open_checkpoint(path).load_weights(other.model)
        assert equal(other.weights(), trained.weights())
        message = refused(lambda: open_checkpoint(path).load_training(other.model, other.optimizer))
        assert "holds weights only" in message

    def test_a_workers_weights_are_the_file_that_it_would_write_alone(
        self, apart: Path, trained: PackedTraining, tmp_path: Path
    ) -> None:
        assert isinstance(trained.model, PackedLlama)
        for worker, solo in enumerate(trained.model.workers()):
            save_weights(solo, tmp_path / "alone.safetensors")
            file = apart / WORKERS[worker] / "model.safetensors"
            assert file.read_bytes() == (tmp_path / "alone.safetensors").read_bytes()

    def test_a_workers_training_state_holds_no_other_workers(self, apart: Path, config: Config, tmp_path: Path) -> None:
        """Tensors that share memory would be written with all of it."""
        alone = Training(config)
        path = save_checkpoint(tmp_path, 3, alone.model, alone.optimizer, {}, config, CACHE)
        limit = 1.2 * (path / "training.pt").stat().st_size
        assert all((apart / worker / "training.pt").stat().st_size < limit for worker in WORKERS)
        assert (apart / "training.pt").stat().st_size < limit / 2
        stored = torch.load(apart / "workers/01/training.pt", weights_only=True)["optimizer"]
        assert stored["norm.weight"]["step"].item() == 1
        assert stored["norm.weight"]["stopped"].item() is True

    def test_the_average_is_what_is_evaluated_bit_for_bit(self, mixed: Path, trained: PackedTraining) -> None:
        evaluated, loaded = (allocate(trained.config.model) for _ in range(2))
        assert isinstance(trained.model, PackedLlama)
        trained.model.copy_average_to(evaluated)
        open_checkpoint(mixed).load_weights(loaded)
        assert all(map(torch.equal, loaded.parameters(), evaluated.parameters()))

    def test_an_average_of_one_model_alone_is_itself(self, config: Config, tmp_path: Path) -> None:
        alone, other = Training(config), Training(config, updates=0, seed=3)
        path = save_checkpoint(tmp_path, 3, alone.model, alone.optimizer, {}, config, CACHE, average=True)
        assert files_of(path) == ["checkpoint.json", "model.safetensors", "training.pt"]
        open_checkpoint(path).load_weights(other.model)
        assert equal(other.weights(), alone.weights())


class TestOneOfThem:
    def loaded(self, checkpoint: Path, config: Config, worker: int | None) -> Llama:
        model = allocate(config.model)
        open_checkpoint(checkpoint).load_weights(model, worker)
        return model

    def test_a_worker_that_is_named_is_loaded_into_a_lone_model(
        self, apart: Path, mixed: Path, trained: PackedTraining
    ) -> None:
        assert isinstance(trained.model, PackedLlama)
        for checkpoint in (apart, mixed):
            for worker in range(3):
                model = self.loaded(checkpoint, trained.config, worker)
                assert equal(dict(model.named_parameters()), trained.model.worker_weights(worker))

    def test_without_an_average_a_worker_has_to_be_named(self, apart: Path, config: Config) -> None:
        message = refused(lambda: self.loaded(apart, config, None))
        assert message.startswith(f"{apart}: has no average of its models, which were not mixed; choose one of its 3")
        assert message.endswith(f"{apart}/workers/00 to {apart}/workers/02")

    def test_a_worker_that_is_not_there(self, apart: Path, config: Config, tmp_path: Path) -> None:
        for worker in (3, -1):
            message = refused(lambda worker=worker: self.loaded(apart, config, worker))
            assert f"{apart}: has no worker {worker}; choose one of its 3 workers" in message
        alone = Training(config)
        path = save_checkpoint(tmp_path, 3, alone.model, None, {}, config, CACHE)
        assert "has no worker 0, but a lone model" in refused(lambda: self.loaded(path, config, 0))


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_packed_models_move_between_devices_bit_for_bit(
    config: Config, tmp_path: Path, before: str, after: str
) -> None:
    one, other = PackedTraining(config, device=before), PackedTraining(config, updates=0, seed=20, device=after)
    path = save_checkpoint(tmp_path, 3, one.model, one.optimizer, PROGRESS, config, CACHE, average=True)
    open_checkpoint(path).load_weights(other.model)
    assert open_checkpoint(path).load_training(other.model, other.optimizer) == PROGRESS
    assert equal(other.weights(), one.weights())
    assert equal(other.moments(), one.moments())
    assert isinstance(other.optimizer, PackedAdamW)
    assert {value.device.type for state in other.optimizer.state.values() for value in state.values()} == {after}
    if before == after:
        evaluated = allocate(config.model).to(after)
        assert isinstance(one.model, PackedLlama)
        one.model.copy_average_to(evaluated)
        loaded = allocate(config.model).to(after)
        open_checkpoint(path).load_weights(loaded)
        assert all(map(torch.equal, loaded.parameters(), evaluated.parameters()))
