"""Weights to a file and back, and what is refused."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.weights import CheckpointWriteError, load_weights, save_weights

MakeConfig = Callable[..., Config]


@pytest.fixture
def model(tiny: MakeConfig) -> Llama:
    return initialize(tiny().model, seed=1)


@pytest.fixture
def other(tiny: MakeConfig) -> Llama:
    return initialize(tiny().model, seed=2)


def same(one: Llama, other: Llama) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(weight, twin) for weight, twin in pairs)


def test_weights_come_back_bit_for_bit(tmp_path: Path, model: Llama, other: Llama) -> None:
    assert not same(model, other)
    save_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert same(model, other)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_file_holds_the_weights_under_the_models_own_names(tmp_path: Path, model: Llama) -> None:
    save_weights(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
        assert file.metadata() == {"format": "pt"}


def test_a_compiled_model_and_a_compiled_part_have_the_same_names(tmp_path: Path, model: Llama, other: Llama) -> None:
    names = {name for name, _ in model.named_parameters()}
    model.blocks[1] = torch.compile(model.blocks[1])
    compiled = torch.compile(model)
    assert {name for name, _ in compiled.named_parameters()} != names
    save_weights(compiled, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names
    load_weights(other, tmp_path / "model.safetensors")
    assert same(model, other)
    load_weights(torch.compile(initialize(other.config, seed=5)), tmp_path / "model.safetensors")


def test_the_file_has_the_mode_that_the_users_mask_gives(tmp_path: Path, model: Llama) -> None:
    (tmp_path / "plain").touch()
    save_weights(model, tmp_path / "model.safetensors")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "model.safetensors")]
    assert modes[0] == modes[1]


def test_loading_fills_the_weights_an_optimizer_holds(tmp_path: Path, model: Llama, other: Llama) -> None:
    held = list(other.parameters())
    save_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert all(weight is before for weight, before in zip(other.parameters(), held, strict=True))
    assert all(weight.requires_grad for weight in held)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"layers": 1}, r"blocks\.1\.attention\.out\.weight is \[32, 32\] in the file and missing in"),
        ({"layers": 3}, r"blocks\.2\.attention\.out\.weight is missing in the file and \[32, 32\] in"),
        ({"ffn": 40}, r"blocks\.0\.ffn\.down\.weight is \[32, 48\] in the file and \[32, 40\] in"),
        ({"vocab_size": 60}, r"embedding\.weight is \[61, 32\] in the file and \[60, 32\] in"),
    ],
)
def test_another_model_is_refused_by_its_first_difference_and_nothing_changed(
    tmp_path: Path, tiny: MakeConfig, model: Llama, change: dict[str, int], difference: str
) -> None:
    wrong, untouched = (initialize(tiny(model=change).model, seed=3) for _ in range(2))
    save_weights(model, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=difference):
        load_weights(wrong, tmp_path / "model.safetensors")
    assert same(wrong, untouched)


@pytest.mark.parametrize("path", ["model.safetensors", "."])
def test_a_missing_file_is_the_users_mistake(tmp_path: Path, model: Llama, path: str) -> None:
    with pytest.raises(ConfigError, match="no such checkpoint"):
        load_weights(model, tmp_path / path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda data: b"{}"]
)
def test_a_damaged_file_is_the_users_mistake(
    tmp_path: Path, model: Llama, other: Llama, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(other, path)
    path.write_bytes(damage(path.read_bytes()))
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(ConfigError, match=r"model\.safetensors: damaged"):
        load_weights(model, path)
    assert all(map(torch.equal, before, model.parameters()))


_TOO_LARGE = """
import resource, signal, sys
from pathlib import Path
import torch
from torch import nn
from tinyllm_ray.train.weights import CheckpointWriteError, save_weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    save_weights(nn.Linear(32, 32), Path(sys.argv[1]))
except CheckpointWriteError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, model: Llama, other: Llama
) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    done = subprocess.run([sys.executable, "-c", _TOO_LARGE, str(path)], capture_output=True, text=True, check=True)
    assert f"{path}: not written" in done.stdout
    assert "File too large" in done.stdout
    assert os.listdir(tmp_path) == ["model.safetensors"]
    load_weights(other, path)
    assert same(model, other)


def test_a_folder_that_is_gone_is_a_write_error(tmp_path: Path, model: Llama) -> None:
    with pytest.raises(CheckpointWriteError, match="No such file"):
        save_weights(model, tmp_path / "gone" / "model.safetensors")


def test_weights_of_another_width_of_number_are_taken(tmp_path: Path, model: Llama) -> None:
    stored = {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    save_file(stored, tmp_path / "half.safetensors")
    load_weights(model, tmp_path / "half.safetensors")
    assert all(torch.equal(weight, stored[name].float()) for name, weight in model.named_parameters())
