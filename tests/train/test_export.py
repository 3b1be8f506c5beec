"""A run's model as transformers opens it: the same function, the same token ids, all of it or nothing."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM
from two_models import largest_difference, random_tokens

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import Preparation, TokenCache
from tinyllm_ray.data.documents import Document
from tinyllm_ray.data.tokenizer import SavedTokenizer, train_tokenizer
from tinyllm_ray.data.write import write_cache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.convert import export_command
from tinyllm_ray.train.export import export_run, read_tokenizer
from tinyllm_ray.train.run import Run
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]

TEXTS = [
    f"Chapter {number}: the cat sat on mat {number * number}, and “purred” éternellement.\n" for number in range(60)
]


def save_cache(folder: Path, texts: list[str] = TEXTS, tokenizer: SavedTokenizer | None = None) -> TokenCache:
    """A token cache with its tokenizer, as a preparation leaves it."""
    return write_cache(
        folder,
        [Document(split, text.encode()) for split in ("train", "validation") for text in texts],
        tokenizer or train_tokenizer(texts, 300, folder / "tokenizer"),
        {},
        splits=("train", "validation"),
        preparation=Preparation(shuffle_seed=0, shuffle_buffer_documents=10, shard_tokens=2**20),
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return save_cache(tmp_path_factory.mktemp("caches") / "cats")


@pytest.fixture(scope="module")
def config(tiny: MakeConfig, cache: TokenCache) -> Config:
    return tiny(model={"vocab_size": 300}, data={"cache": str(cache.folder)}, training={"max_updates": 3})


@pytest.fixture(scope="module")
def run(config: Config, cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained."""
    out = tmp_path_factory.mktemp("run")
    assert Run(config, cache, out).execute() == 0
    return out


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "cats"
    export_run(run, out)
    return out


@pytest.fixture
def model(run: Path, config: Config) -> Llama:
    """The run's model."""
    model = initialize(config.model, seed=0)
    find_checkpoint(run).load_weights(model)
    return model


class TestModel:
    def test_opens_without_a_warning_or_a_key_too_few_or_too_many(self, exported: Path) -> None:
        said: list[str] = []
        listener = logging.Handler(logging.INFO)
        listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("transformers").addHandler(listener)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                theirs, info = LlamaForCausalLM.from_pretrained(exported, output_loading_info=True)
                AutoTokenizer.from_pretrained(exported)
        finally:
            logging.getLogger("transformers").removeHandler(listener)
        assert not any(info.values()), info
        assert (said, list(warned)) == ([], [])
        assert theirs.dtype == torch.float32
        assert theirs.lm_head.weight is theirs.model.embed_tokens.weight

    def test_gives_the_logits_of_the_trained_model(self, exported: Path, model: Llama, config: Config) -> None:
        theirs = LlamaForCausalLM.from_pretrained(exported)
        tokens = random_tokens(300, rows=2, tokens=config.model.context)
        assert largest_difference(theirs, model, tokens) < 1e-5
        assert largest_difference(theirs.double(), model.double(), tokens) < 1e-6
        assert largest_difference(theirs, initialize(config.model, seed=0).double(), tokens) > 1e-2, "untrained"

    def test_generates_what_our_own_greedy_loop_does(self, exported: Path, model: Llama) -> None:
        theirs, tokenizer = LlamaForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
        prompt = tokenizer("Chapter", return_tensors="pt")
        found = theirs.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        tokens = prompt["input_ids"]
        with torch.no_grad():
            while tokens.shape[1] < found.shape[1]:
                tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
        assert found.tolist() == tokens.tolist()
        assert found.shape[1] == prompt["input_ids"].shape[1] + 6

    def test_an_earlier_checkpoint_can_be_named(
        self, run: Path, tmp_path: Path, config: Config, cache: TokenCache
    ) -> None:
        other = initialize(config.model, seed=9)
        for step, model in ((1, other), (2, initialize(config.model, seed=8))):
            save_checkpoint(tmp_path, step, model, None, {}, config, cache.identity)
        export_run(tmp_path / "checkpoints" / "step-00000001", tmp_path / "out")
        theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out")
        assert largest_difference(theirs, other, random_tokens(300, rows=1, tokens=16)) < 1e-5


class TestTokenizer:
    @pytest.mark.parametrize("text", [*TEXTS[:2], "", " \n\n\tx", "世界 🎉<|endoftext|>done", "the  cat's 1999"])
    def test_gives_the_ids_of_the_caches(self, exported: Path, cache: TokenCache, text: str) -> None:
        theirs = AutoTokenizer.from_pretrained(exported)
        ours = Tokenizer.from_file(str(cache.folder / "tokenizer" / "tokenizer.json"))
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text

    def test_ids_of_special_tokens_are_the_same_in_both(self, exported: Path, cache: TokenCache) -> None:
        tokenizer, config = AutoTokenizer.from_pretrained(exported), LlamaForCausalLM.from_pretrained(exported).config
        assert config.eos_token_id == tokenizer.eos_token_id == cache.manifest.end_of_text
        assert config.bos_token_id is tokenizer.bos_token_id is None
        assert config.pad_token_id is tokenizer.pad_token_id is None

    def test_gives_what_the_model_takes_and_knows_its_context(self, exported: Path, config: Config) -> None:
        """token_type_ids, which versions before 5 add by themselves, would end generate with an error."""
        settings = json.loads((exported / "tokenizer_config.json").read_text())
        assert settings["model_input_names"] == ["input_ids", "attention_mask"]
        assert AutoTokenizer.from_pretrained(exported).model_max_length == config.model.context

    def test_is_byte_for_byte_the_caches(self, exported: Path, cache: TokenCache) -> None:
        kept = (cache.folder / "tokenizer" / "tokenizer.json").read_bytes()
        assert (exported / "tokenizer.json").read_bytes() == kept


class TestWithoutTokenizer:
    """The weights are exported all the same, and a line says what is missing; a wrong tokenizer is never exported."""

    @pytest.fixture
    def moved(self, model: Llama, tmp_path: Path, config: Config, cache: TokenCache) -> Callable[[Path], Path]:
        """A checkpoint whose cache is named to lie elsewhere."""

        def move(folder: Path) -> Path:
            changed = config.model_copy(update={"data": config.data.model_copy(update={"cache": str(folder)})})
            (tmp_path / "moved").mkdir()
            return save_checkpoint(tmp_path / "moved", 3, model, None, {}, changed, cache.identity)

        return move

    def check(self, run: Path, out: Path, words: str) -> None:
        first, second = export_run(run, out)
        assert "AutoTokenizer" not in first
        assert second.startswith("without a tokenizer: ")
        assert words in second
        assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
        assert LlamaForCausalLM.from_pretrained(out).config.eos_token_id is None

    def test_cache_is_gone(self, moved: Callable[[Path], Path], tmp_path: Path) -> None:
        self.check(moved(tmp_path / "gone"), tmp_path / "out", "gone: no such folder")

    def test_cache_has_none(self, moved: Callable[[Path], Path], tmp_path: Path) -> None:
        cache = save_cache(tmp_path / "cache")
        (cache.folder / "tokenizer" / "tokenizer.json").unlink()
        self.check(moved(cache.folder), tmp_path / "out", "holds no tokenizer that can be read (No such file")

    def test_cache_has_another_than_it_was_made_with(self, moved: Callable[[Path], Path], tmp_path: Path) -> None:
        cache = save_cache(tmp_path / "cache")
        train_tokenizer(["something else"], 290, cache.folder / "tokenizer")
        self.check(moved(cache.folder), tmp_path / "out", "is not the tokenizer of the cache's manifest")

    def test_another_cache_lies_there_by_now(self, moved: Callable[[Path], Path], tmp_path: Path) -> None:
        cache = save_cache(tmp_path / "cache", TEXTS[:40])
        self.check(moved(cache.folder), tmp_path / "out", "another token cache than the run was trained on")

    def test_the_cache_can_be_named(
        self, moved: Callable[[Path], Path], cache: TokenCache, tmp_path: Path, exported: Path
    ) -> None:
        (line,) = export_run(moved(tmp_path / "gone"), tmp_path / "out", cache=cache.folder)
        assert "AutoTokenizer" in line
        for name in os.listdir(exported):
            assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes(), name

    def test_a_tokenizer_of_more_ids_than_the_model_is_never_taken(self, cache: TokenCache) -> None:
        with pytest.raises(ConfigError, match="has 300 ids, but the model's vocab_size is 299"):
            read_tokenizer(cache.folder, vocab_size=299)
        assert read_tokenizer(cache.folder, vocab_size=300).settings["eos_token"]

    def test_a_named_cache_that_cannot_serve_is_a_mistake(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such folder"):
            export_run(run, tmp_path / "out", cache=tmp_path / "gone")
        assert not (tmp_path / "out").exists()


class TestSource:
    def test_a_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="holds no checkpoints"):
            export_run(tmp_path, tmp_path / "out")

    def test_a_configuration_without_a_model_is_refused(self, model: Llama, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("training: {}\n")
        save_weights(model, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=r"config.yaml: model: "):
            export_run(tmp_path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


class TestCommand:
    def test_says_what_opens_the_folder(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export_command([str(run), "--out", str(tmp_path / "out")]) == 0
        out = str(tmp_path / "out")
        expected = f"LlamaForCausalLM.from_pretrained({out!r}) loads the model, AutoTokenizer.from_pretrained({out!r})"
        assert capsys.readouterr().out == f"{expected} its tokenizer\n"

    def test_a_mistake_is_one_line_and_status_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export_command([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_needs_neither_transformers_nor_tokenizers(self, run: Path, exported: Path, tmp_path: Path) -> None:
        code = (
            "import sys; sys.modules |= {'transformers': None, 'tokenizers': None, 'datasets': None}\n"
            "from tinyllm_ray.train.convert import export_command, import_command\n"
            f"assert export_command([{str(run)!r}, '--out', 'there']) == 0\n"
            "assert import_command(['there', '--out', 'back']) == 0\n"
            "assert export_command(['back', '--out', 'again']) == 0\n"
        )
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
        for folder in ("there", "again"):
            kept = (tmp_path / folder / "model.safetensors").read_bytes()
            assert kept == (exported / "model.safetensors").read_bytes(), folder
