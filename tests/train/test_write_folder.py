"""A model as transformers' folder: the same function whatever its settings, written whole or not at all."""

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import LlamaForCausalLM
from two_models import largest_difference, random_tokens, weights_of

from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.export import TokenizerFiles, write_folder

MakeConfig = Callable[..., Config]


class TestModel:
    def test_gives_the_logits_of_a_preset(self, tmp_path: Path) -> None:
        config = load("nano").model
        model = initialize(config, seed=0)
        write_folder(config, weights_of(model), tmp_path / "nano", None)
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "nano")
        tokens = random_tokens(config.vocab_size, rows=1, tokens=config.context)
        assert largest_difference(theirs, model, tokens) < 1e-5
        assert largest_difference(theirs.double(), model.double(), tokens) < 1e-6

    def test_settings_other_than_the_defaults_arrive(self, tmp_path: Path, tiny: MakeConfig) -> None:
        """A default would hide a key that is not read."""
        changed = {"rope_theta": 50.0, "norm_eps": 0.1, "context": 24, "ffn": 40}
        config = tiny().model.model_copy(update=changed)
        model = initialize(config, seed=0)
        write_folder(config, weights_of(model), tmp_path / "model", None)
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        assert largest_difference(theirs.double(), model.double(), random_tokens(61, rows=2, tokens=24)) < 1e-6
        assert theirs.config.max_position_embeddings == 24
        assert theirs.config.initializer_range == config.init_std

    def test_the_file_says_that_its_tensors_are_of_pytorch(self, tmp_path: Path, tiny: MakeConfig) -> None:
        """Some versions of transformers refuse a file without it."""
        config = tiny().model
        write_folder(config, weights_of(initialize(config, seed=0)), tmp_path / "model", None)
        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    @pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
    def test_ids_of_special_tokens_come_from_the_tokenizer(self, tmp_path: Path, tiny: MakeConfig, kind: str) -> None:
        words = ["a", "b", "<s>", "</s>", "<pad>"]
        vocabulary: Any = [[word, 0.0] for word in words] if kind == "Unigram" else {w: i for i, w in enumerate(words)}
        values = {"model": {"type": kind, "vocab": vocabulary}, "added_tokens": [{"content": "<pad>", "id": 7}]}
        settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        config = tiny().model
        files = TokenizerFiles(json.dumps(values).encode(), settings)
        write_folder(config, weights_of(initialize(config, seed=0)), tmp_path / "out", files)
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [2, 3, 7]


FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


class TestFolder:
    @pytest.fixture
    def write(self, tiny: MakeConfig) -> Callable[[Path], None]:
        """Writes a model with a tokenizer: four files."""
        config = tiny().model
        weights = weights_of(initialize(config, seed=0))
        tokenizer = TokenizerFiles(b'{"model": {"vocab": {}}}', {})
        return lambda out: write_folder(config, weights, out, tokenizer)

    def test_an_empty_folder_will_do_and_missing_parents_are_made(
        self, write: Callable[[Path], None], tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        for out in (tmp_path / "empty", tmp_path / "a" / "b"):
            write(out)
            assert sorted(os.listdir(out)) == FILES
        assert sorted(os.listdir(tmp_path)) == ["a", "empty"]
        assert os.listdir(tmp_path / "a") == ["b"]

    def test_a_folder_that_a_link_names_is_written_to(self, write: Callable[[Path], None], tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to("empty")
        write(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert sorted(os.listdir(tmp_path / "empty")) == FILES

    def test_one_that_holds_something_is_refused_and_left(self, write: Callable[[Path], None], tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("irreplaceable")
        with pytest.raises(ConfigError, match=r"--out .*out: the folder is not empty; choose another"):
            write(tmp_path / "out")
        assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.txt"]

    def test_a_file_is_refused(self, write: Callable[[Path], None], tmp_path: Path) -> None:
        (tmp_path / "out").write_text("a file")
        for out in (tmp_path / "out", tmp_path / "out" / "below"):
            with pytest.raises(ConfigError, match=r"--out .*: (Not a directory|File exists); choose"):
                write(out)
        assert os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize("fit", range(len(FILES)))
    def test_nothing_is_left_where_the_disk_is_full_after_any_file(
        self, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit: int
    ) -> None:
        real, calls = os.fsync, itertools.count()

        def fill(descriptor: int) -> None:
            if next(calls) >= fit:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fill)
        with pytest.raises(ConfigError, match=r"--out .*out: No space left on device"):
            write(tmp_path / "out")
        assert os.listdir(tmp_path) == []
