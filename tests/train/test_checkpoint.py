"""Weights to disk and back, and what is refused."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.checkpoint import load_weights, save_weights

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


def test_loading_fills_the_weights_an_optimizer_holds(tmp_path: Path, model: Llama, other: Llama) -> None:
    held = list(other.parameters())
    save_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert all(weight is before for weight, before in zip(other.parameters(), held, strict=True))
    assert all(weight.requires_grad for weight in held)


@pytest.mark.parametrize("change", [{"layers": 1}, {"layers": 3}, {"ffn": 40}, {"vocab_size": 60}])
def test_another_model_is_refused_and_nothing_changed(
    tmp_path: Path, tiny: MakeConfig, model: Llama, change: dict[str, int]
) -> None:
    wrong, untouched = (initialize(tiny(model=change).model, seed=3) for _ in range(2))
    save_weights(model, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="holds another model"):
        load_weights(wrong, tmp_path / "model.safetensors")
    assert same(wrong, untouched)


def test_a_missing_file_is_the_users_mistake(tmp_path: Path, model: Llama) -> None:
    with pytest.raises(ConfigError, match="no such checkpoint"):
        load_weights(model, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:100], lambda data: b"", lambda data: b"{}"]
)
def test_a_damaged_file_is_the_users_mistake(tmp_path: Path, model: Llama, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_weights(model, path)


class TestFailedWrite:
    """The previous checkpoint stays whole, and no part of the new one is left."""

    @pytest.fixture
    def path(self, tmp_path: Path, model: Llama) -> Path:
        save_weights(model, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    def check(self, path: Path, model: Llama, other: Llama) -> None:
        with pytest.raises(OSError, match="No space left"):
            save_weights(other, path)
        assert os.listdir(path.parent) == [path.name]
        load_weights(other, path)
        assert same(model, other)

    def test_disk_full_while_writing(
        self, path: Path, model: Llama, other: Llama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = Path.open

        def short(self: Path, *arguments: Any, **keywords: Any) -> Any:
            file = whole(self, *arguments, **keywords)
            if "w" in (arguments or ("r",))[0]:
                return Full(file)
            return file

        monkeypatch.setattr(Path, "open", short)
        self.check(path, model, other)

    def test_disk_full_while_flushing(
        self, path: Path, model: Llama, other: Llama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        self.check(path, model, other)


class Full:
    """A file that takes half of what it is given."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")
