"""Folders of transformers read back, however they were stored, and what is refused."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from two_models import weights_of

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.convert import import_command
from tinyllm_ray.train.export import export_run, write_folder
from tinyllm_ray.train.import_folder import import_folder, import_model
from tinyllm_ray.train.weights import load_weights
from tinyllm_ray.yamlfile import read_mapping

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def model(tiny: MakeConfig) -> Llama:
    return initialize(tiny(model={"rope_theta": 500.0}).model, seed=5)


@pytest.fixture
def folder(model: Llama, tmp_path: Path) -> Path:
    """What an export leaves."""
    write_folder(model.config, weights_of(model), tmp_path / "exported", None)
    return tmp_path / "exported"


def same(found: tuple[ModelConfig, dict[str, torch.Tensor]], model: Llama) -> bool:
    config, weights = found
    kept = weights_of(model)
    return (
        config == model.config and list(weights) == list(kept) and all(torch.equal(weights[n], kept[n]) for n in kept)
    )


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class TestRead:
    def test_an_export_comes_back_bit_for_bit(self, folder: Path, model: Llama) -> None:
        assert same(import_model(folder), model)

    @pytest.mark.parametrize("shard", ["50GB", "20KB"])
    def test_what_transformers_saves_comes_back_bit_for_bit(
        self, folder: Path, model: Llama, tmp_path: Path, shard: str
    ) -> None:
        LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved", max_shard_size=shard)
        assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard == "20KB")
        assert same(import_model(tmp_path / "saved"), model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_weights_become_float32(
        self, folder: Path, model: Llama, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        LlamaForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(tmp_path / "saved")
        config, weights = import_model(tmp_path / "saved")
        assert config == model.config
        for name, weight in weights_of(model).items():
            assert torch.equal(weights[name], weight.to(dtype).float()), name
            assert weights[name].dtype == torch.float32

    def test_where_both_are_there_the_single_file_counts(self, folder: Path, model: Llama) -> None:
        """As in transformers, which leaves an old index behind when it saves over it."""
        (folder / "model.safetensors.index.json").write_text("{}")
        assert same(import_model(folder), model)


class TestRefused:
    def check(self, folder: Path, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as refusal:
            import_model(folder)
        assert "\n" not in str(refusal.value)

    def test_no_folder(self, tmp_path: Path) -> None:
        self.check(tmp_path / "gone", "gone: no such folder")

    def test_no_configuration(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        self.check(folder, r"config.json: cannot be read: No such file")

    @pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[]", "holds a list"), ("\udcff", "is no JSON")])
    def test_a_damaged_configuration(self, folder: Path, text: str, words: str) -> None:
        (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        self.check(folder, f"config.json: {words}")

    def test_a_model_that_ours_cannot_represent(self, folder: Path) -> None:
        change_config(folder, num_key_value_heads=2)
        self.check(folder, r"config.json: num_key_value_heads 2 cannot be represented")

    def test_weights_of_another_shape(self, folder: Path) -> None:
        change_config(folder, intermediate_size=40)
        self.check(folder, r"model.safetensors: model.layers.0.mlp.*\[48, 32\], \[40, 32\] expected|\[32, 48\]")

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        self.check(folder, "holds neither model.safetensors nor model.safetensors.index.json")

    def test_a_pickle_is_not_opened(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save({}, folder / "pytorch_model.bin")
        self.check(folder, "pytorch_model.bin: a pickle may run code.*save_pretrained")

    @pytest.mark.parametrize("keep", [-1, 100, 0])
    def test_a_damaged_file(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self.check(folder, "model.safetensors: damaged, or no safetensors")


class TestRefusedIndex:
    @pytest.fixture
    def sharded(self, folder: Path, tmp_path: Path) -> Path:
        LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        return tmp_path / "saved"

    def check(self, folder: Path, words: str) -> None:
        TestRefused().check(folder, words)

    def test_a_shard_is_gone(self, sharded: Path) -> None:
        sorted(sharded.glob("*.safetensors"))[1].unlink()
        self.check(sharded, r"model-00002-of-.*: no such file, but model.safetensors.index.json names it")

    def test_a_shard_lacks_a_tensor(self, sharded: Path) -> None:
        path = sorted(sharded.glob("*.safetensors"))[-1]
        tensors = load_file(path)
        gone = sorted(tensors)[0]
        save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path)
        self.check(sharded, f"saved: {gone} is missing")

    @pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, None])
    def test_a_name_leads_out_of_the_folder(self, sharded: Path, name: Any) -> None:
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        self.check(sharded, f"index.json: {name!r} under weight_map is no safetensors file of the folder")

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["model.safetensors"]}'])
    def test_no_names(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)
        self.check(sharded, "index.json: names no files under weight_map")


class TestFolder:
    def test_holds_weights_and_the_section_model(self, folder: Path, model: Llama, tmp_path: Path) -> None:
        import_folder(folder, tmp_path / "back")
        assert sorted(os.listdir(tmp_path / "back")) == ["config.yaml", "model.safetensors"]
        section = read_mapping(tmp_path / "back" / "config.yaml")
        assert ModelConfig.model_validate(section["model"]) == model.config
        assert list(section) == ["model"]
        other = initialize(model.config, seed=6)
        load_weights(other, tmp_path / "back" / "model.safetensors")
        assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))

    def test_the_command_that_it_says_is_one_for_a_shell(self, folder: Path, tmp_path: Path) -> None:
        spaced = tmp_path / "a model"
        shutil.copytree(folder, spaced)
        (spaced / "tokenizer.json").write_text("{}")
        assert shlex.quote(str(spaced)) in import_folder(spaced, tmp_path / "back")[-1]

    def test_can_be_exported_again_to_the_same_bytes(self, folder: Path, tmp_path: Path) -> None:
        import_folder(folder, tmp_path / "back")
        _, without = export_run(tmp_path / "back", tmp_path / "again")
        assert "config.yaml: names no token cache" in without, "the default cache's tokenizer need not be the model's"
        assert sorted(os.listdir(tmp_path / "again")) == ["config.json", "model.safetensors"]
        for name in os.listdir(folder):
            assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name

    def test_one_that_holds_something_is_refused_and_left(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the folder is not empty"):
            import_folder(folder, folder)
        assert sorted(os.listdir(tmp_path)) == ["exported"]

    def test_nothing_is_written_for_a_model_that_is_refused(self, folder: Path, tmp_path: Path) -> None:
        change_config(folder, mlp_bias=True)
        assert import_command([str(folder), "--out", str(tmp_path / "back")]) == 2
        assert os.listdir(tmp_path) == ["exported"]


def test_the_command_says_what_is_there(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_command([str(folder), "--out", str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/back/model.safetensors holds the weights, "
        f"{tmp_path}/back/config.yaml the section model that fits them"
    ]
    (folder / "tokenizer.json").write_text("{}")
    assert import_command([str(folder), "--out", str(tmp_path / "more")]) == 0
    assert f"prepare --tokenizer {folder} " in capsys.readouterr().out
