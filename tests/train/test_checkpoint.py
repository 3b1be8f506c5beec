"""One checkpoint: what comes back from it, what damage shows, and which recipes may go on from it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import CACHE, Training, equal

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import source_identity
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint

MakeConfig = Callable[..., Config]

PROGRESS: dict[str, Any] = {
    "step": 3,
    "cursor": 2**40,
    "seconds": 0.1,
    "best": {"loss": 5.5, "epoch": 1},
    "epochs": 1,
    "pair": (1, "a"),
    "list": [None, True, float("inf")],
}


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def trained(config: Config) -> Training:
    return Training(config)


@pytest.fixture(scope="module")
def saved(trained: Training, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint, which no test changes."""
    run = tmp_path_factory.mktemp("run")
    torch.manual_seed(7)
    return save_checkpoint(run, 3, trained.model, trained.optimizer, PROGRESS, config, CACHE)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


class TestRoundTrip:
    def test_weights_moments_and_progress_come_back_bit_for_bit(
        self, saved: Path, trained: Training, config: Config
    ) -> None:
        other = Training(config, updates=0, seed=2)
        checkpoint = open_checkpoint(saved)
        checkpoint.load_weights(other.model)
        assert checkpoint.load_training(other.model, other.optimizer) == PROGRESS
        assert equal(other.weights(), trained.weights())
        assert equal(other.moments(), trained.moments())
        assert len(other.moments()) == 3 * len(other.weights())

    def test_what_was_restored_goes_on_like_the_one_that_was_saved(self, config: Config, tmp_path: Path) -> None:
        unbroken, resumed = Training(config), Training(config, updates=1, seed=9)
        save_checkpoint(tmp_path, 3, unbroken.model, unbroken.optimizer, {}, config, CACHE)
        checkpoint = find_checkpoint(tmp_path)
        checkpoint.load_weights(resumed.model)
        checkpoint.load_training(resumed.model, resumed.optimizer)
        resumed.updates = unbroken.updates
        for _ in range(3):
            unbroken.update()
            resumed.update()
        assert equal(resumed.weights(), unbroken.weights())
        assert equal(resumed.moments(), unbroken.moments())

    def test_random_numbers_go_on_where_they_were(self, config: Config, trained: Training, tmp_path: Path) -> None:
        torch.manual_seed(11)
        torch.rand(5)
        save_checkpoint(tmp_path, 1, trained.model, trained.optimizer, {}, config, CACHE)
        expected = torch.rand(5)
        torch.manual_seed(0)
        other = Training(config, updates=0)
        find_checkpoint(tmp_path).load_training(other.model, other.optimizer)
        assert torch.equal(torch.rand(5), expected)

    def test_saving_changes_nothing_of_the_training(self, config: Config, tmp_path: Path) -> None:
        training = Training(config)
        weights, moments, random = training.weights(), training.moments(), torch.get_rng_state()
        save_checkpoint(tmp_path, 3, training.model, training.optimizer, {}, config, CACHE)
        assert equal(training.weights(), weights)
        assert equal(training.moments(), moments)
        assert torch.equal(torch.get_rng_state(), random)

    def test_the_optimizers_own_tensors_stay_and_are_filled(self, saved: Path, config: Config) -> None:
        """A compiled or captured update reads those it has seen, the learning rate among them."""
        other = Training(config, updates=2, seed=4)
        held = [group["lr"] for group in other.optimizer.param_groups]
        held += [value for state in other.optimizer.state.values() for value in state.values()]
        settings = [{**group, "params": None, "lr": None} for group in other.optimizer.param_groups]
        open_checkpoint(saved).load_training(other.model, other.optimizer)
        after = [group["lr"] for group in other.optimizer.param_groups]
        after += [value for state in other.optimizer.state.values() for value in state.values()]
        assert len(held) == len(after)
        assert all(one is other for one, other in zip(held, after, strict=True))
        assert [{**group, "params": None, "lr": None} for group in other.optimizer.param_groups] == settings

    def test_restored_moments_are_no_views_of_the_file(self, copy: Path, config: Config) -> None:
        """A checkpoint that retention removes must not take memory away from a run that resumed from it."""
        other = Training(config, updates=0)
        open_checkpoint(copy).load_training(other.model, other.optimizer)
        before = other.moments()
        with (copy / "training.pt").open("r+b") as file:  # in place: a mapping of the file would show it
            file.write(b"\xff" * (copy / "training.pt").stat().st_size)
        assert equal(other.moments(), before)

    def test_an_optimizer_without_state_comes_back_without(self, config: Config, tmp_path: Path) -> None:
        fresh, other = Training(config, updates=0), Training(config, updates=2)
        save_checkpoint(tmp_path, 0, fresh.model, fresh.optimizer, {}, config, CACHE)
        find_checkpoint(tmp_path).load_training(other.model, other.optimizer)
        assert other.moments() == {}

    def test_state_that_was_not_saved_does_not_stay(self, saved: Path, trained: Training, config: Config) -> None:
        other = Training(config)
        for state in other.optimizer.state.values():
            state["max_exp_avg_sq"] = torch.ones(3)
        open_checkpoint(saved).load_training(other.model, other.optimizer)
        assert equal(other.moments(), trained.moments())

    @pytest.mark.parametrize("compiled_first", [True, False])
    def test_a_compiled_models_checkpoint_is_the_same(
        self, config: Config, saved: Path, tmp_path: Path, compiled_first: bool
    ) -> None:
        one, other = Training(config), Training(config, updates=0, seed=3)
        wrapped, plain = torch.compile(one.model), one.model
        torch.manual_seed(7)
        saver, loader = (wrapped, other.model) if compiled_first else (plain, torch.compile(other.model))
        save_checkpoint(tmp_path, 3, saver, one.optimizer, PROGRESS, config, CACHE)
        assert find_checkpoint(tmp_path).manifest.files == open_checkpoint(saved).manifest.files
        find_checkpoint(tmp_path).load_weights(loader)
        find_checkpoint(tmp_path).load_training(loader, other.optimizer)
        assert equal(other.weights(), one.weights())
        assert equal(other.moments(), one.moments())

    def test_the_state_is_named_by_parameter(self, saved: Path, trained: Training) -> None:
        stored = torch.load(saved / "training.pt", weights_only=True)
        assert stored.keys() == {"optimizer", "random", "progress"}
        assert stored["optimizer"].keys() == trained.weights().keys()
        assert stored["optimizer"]["embedding.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}

    def test_weights_alone_can_be_loaded_but_not_gone_on_from(
        self, config: Config, trained: Training, tmp_path: Path
    ) -> None:
        path = save_checkpoint(tmp_path, 5, trained.model, None, {}, config, CACHE)
        assert sorted(os.listdir(path)) == ["checkpoint.json", "model.safetensors"]
        other = Training(config, updates=0, seed=2)
        checkpoint = find_checkpoint(tmp_path)
        assert not checkpoint.has_training
        checkpoint.load_weights(other.model)
        assert equal(other.weights(), trained.weights())
        with pytest.raises(ConfigError, match="step-00000005: holds weights only") as error:
            checkpoint.load_training(other.model, other.optimizer)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "change", [{"layers": 1}, {"ffn": 40}, {"width": 16}], ids=["fewer layers", "narrower", "other width"]
    )
    def test_another_models_state_is_refused_and_changes_nothing(
        self, saved: Path, tiny: MakeConfig, change: dict[str, int]
    ) -> None:
        other = Training(tiny(model=change), updates=2)
        moments, random = other.moments(), torch.get_rng_state()
        with pytest.raises(ConfigError, match=r"training\.pt: holds another model's state: .*blocks\.|embedding"):
            open_checkpoint(saved).load_training(other.model, other.optimizer)
        assert equal(other.moments(), moments)
        assert torch.equal(torch.get_rng_state(), random)

    def test_an_update_on_the_host_counts_its_steps_on_the_host(self, saved: Path, config: Config) -> None:
        """PyTorch refuses a count on another device than the kind of update expects."""
        other = Training(config, updates=0)
        plain = torch.optim.AdamW(other.model.parameters(), lr=0.1, foreach=True)
        open_checkpoint(saved).load_training(other.model, plain)
        other.optimizer = plain
        assert {str(state["step"].device) for state in plain.state.values()} == {"cpu"}
        for weight in other.model.parameters():
            weight.grad = torch.ones_like(weight)
        plain.step()
        assert {state["step"].item() for state in plain.state.values()} == {4.0}


@pytest.mark.parametrize(
    "value", [np.float64(1.0), np.int64(1), Path("a"), {1}, torch.zeros(1), {"a": [np.float32(0)]}]
)
def test_a_progress_that_could_not_be_loaded_is_not_written(
    value: Any, trained: Training, config: Config, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"progress\['value'\]"):
        save_checkpoint(tmp_path, 1, trained.model, trained.optimizer, {"value": value}, config, CACHE)
    assert os.listdir(tmp_path / "checkpoints") == [".lock"]


def test_the_manifest_says_what_the_files_belong_to(saved: Path, config: Config) -> None:
    manifest = json.loads((saved / "checkpoint.json").read_text())
    assert (manifest["schema_version"], manifest["step"]) == (1, 3)
    assert manifest["config"] == config.model_dump(mode="json")
    assert (manifest["recipe_identity"], manifest["cache_identity"]) == (config.recipe_identity, CACHE)
    assert manifest["source"]["sha256"] == source_identity().sha256
    assert manifest["torch"] == torch.__version__
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (saved / name).stat().st_size for name in ("model.safetensors", "training.pt")
    }
    assert open_checkpoint(saved).config == config


@pytest.mark.gpu
class TestDevices:
    """A run may go on where another device is."""

    @pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
    def test_weights_and_moments_move_between_devices_bit_for_bit(
        self, config: Config, tmp_path: Path, before: str, after: str
    ) -> None:
        one, other = Training(config, device=before), Training(config, updates=0, seed=2, device=after)
        save_checkpoint(tmp_path, 3, one.model, one.optimizer, PROGRESS, config, CACHE)
        find_checkpoint(tmp_path).load_weights(other.model)
        assert find_checkpoint(tmp_path).load_training(other.model, other.optimizer) == PROGRESS
        assert equal(other.weights(), one.weights())
        assert equal(other.moments(), one.moments())
        states = other.optimizer.state.values()
        assert {value.device.type for state in states for value in state.values()} == {after}
        other.updates = 3
        other.update()

    def test_an_update_that_counts_on_the_host_gets_its_count_there(self, saved: Path, config: Config) -> None:
        other = Training(config, updates=0, device="cuda")
        plain = torch.optim.AdamW(other.model.parameters(), lr=0.1, foreach=True)
        open_checkpoint(saved).load_training(other.model, plain)
        assert {state["step"].device.type for state in plain.state.values()} == {"cpu"}
        assert {state["exp_avg"].device.type for state in plain.state.values()} == {"cuda"}

    def test_the_devices_random_numbers_go_on_where_they_were(self, config: Config, tmp_path: Path) -> None:
        training = Training(config, device="cuda")
        torch.rand(5, device="cuda")
        save_checkpoint(tmp_path, 3, training.model, training.optimizer, {}, config, CACHE)
        expected = torch.rand(5, device="cuda")
        torch.cuda.manual_seed(0)
        find_checkpoint(tmp_path).load_training(training.model, training.optimizer)
        assert torch.equal(torch.rand(5, device="cuda"), expected)
