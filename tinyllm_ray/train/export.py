"""A run's model as a folder that transformers opens: config.json, model.safetensors and the cache's tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors.torch import save

from tinyllm_ray.data.cache import TOKENIZER_FOLDER, open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically
from tinyllm_ray.model.huggingface import Weights, to_llama_config, to_transformers
from tinyllm_ray.model.llama import allocate
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.new_folder import new_folder
from tinyllm_ray.train.weights import load_weights
from tinyllm_ray.train.weights_source import WeightsSource, open_weights

CONFIG_JSON: Final = "config.json"
SINGLE_FILE: Final = "model.safetensors"


class TokenizerFiles(NamedTuple):
    """A tokenizer as transformers stores it."""

    tokenizer: bytes
    """Content of tokenizer.json."""
    settings: dict[str, Any]
    """Content of tokenizer_config.json."""


def export_run(source: Path, out: Path, *, cache: Path | None = None) -> list[str]:
    """Write the model that `open_weights` finds in `source` into the folder `out`; lines that say what is there.

    `cache` names the token cache where it no longer lies where the configuration says. Without the cache's tokenizer
    the model is written all the same, and a line says so.

    Raises ConfigError where `out` is not empty, `source` holds no model, or `cache` is another than the training's.
    """
    found = open_weights(source)
    config = found.model
    model = allocate(config)
    load_weights(model, found.weights)
    try:
        tokenizer = read_tokenizer(cache or _cache_of(found), config.vocab_size, found.cache_identity)
        missing = []
    except ConfigError as error:
        if cache:
            raise
        tokenizer = None
        missing = [f"without a tokenizer: {error}; --cache names the token cache that the model was trained on"]
    write_folder(config, {name: weight.detach() for name, weight in model.named_parameters()}, out, tokenizer)
    auto = "" if missing else f", AutoTokenizer.from_pretrained({str(out)!r}) its tokenizer"
    return [f"LlamaForCausalLM.from_pretrained({str(out)!r}) loads the model{auto}", *missing]


def write_folder(config: ModelConfig, weights: Weights, out: Path, tokenizer: TokenizerFiles | None) -> None:
    """Write a model, given by its weights under our names, as transformers' folder `out`; all of it or nothing.

    Plain files, so that the machine which trained needs no transformers. Raises ConfigError where `out` is not empty
    or cannot be written.
    """
    with new_folder(out) as folder:
        _write_json(folder / CONFIG_JSON, to_llama_config(config) | (_special_ids(tokenizer) if tokenizer else {}))
        if tokenizer:
            write_atomically(folder / TOKENIZER_FILE, tokenizer.tokenizer)
            # Left to itself, PreTrainedTokenizerFast also gives token_type_ids, which a Llama's generate refuses.
            inputs = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": config.context}
            _write_json(folder / CONFIG_FILE, tokenizer.settings | inputs)
        parts = {name: part.contiguous() for name, part in to_transformers(weights).items()}
        write_atomically(folder / SINGLE_FILE, save(parts, metadata={"format": "pt"}))


def read_tokenizer(cache_folder: str | Path, vocab_size: int, identity: str | None = None) -> TokenizerFiles:
    """The tokenizer that the cache in `cache_folder` was made with, for a model of `vocab_size` entries.

    Raises ConfigError where there is none, or it is not the manifest's, or has ids beyond the model's, or where the
    cache's identity is not `identity`.
    """
    cache = open_cache(cache_folder)
    if identity not in (None, cache.identity):
        raise ConfigError(f"{cache.folder}: holds another token cache than the run was trained on")
    if cache.vocab_size > vocab_size:
        raise ConfigError(f"{cache.folder}: has {cache.vocab_size} ids, but the model's vocab_size is {vocab_size}")
    folder = cache.folder / TOKENIZER_FOLDER
    try:
        data = (folder / TOKENIZER_FILE).read_bytes()
        settings = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder}: the cache holds no tokenizer that can be read ({reason})") from error
    if hashlib.sha256(data).hexdigest() != cache.manifest.tokenizer_fingerprint:
        raise ConfigError(f"{folder / TOKENIZER_FILE}: is not the tokenizer of the cache's manifest")
    return TokenizerFiles(data, settings)


def _special_ids(tokenizer: TokenizerFiles) -> dict[str, int | None]:
    """The ids of the special tokens that config.json names; null where the tokenizer has none."""
    values = json.loads(tokenizer.tokenizer)
    vocabulary = values["model"]["vocab"]
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {text: at for at, (text, _) in enumerate(vocabulary)}
    ids |= {token["content"]: token["id"] for token in values.get("added_tokens", ())}
    return {f"{name}_token_id": ids.get(tokenizer.settings.get(f"{name}_token")) for name in ("bos", "eos", "pad")}


def _cache_of(source: WeightsSource) -> str | Path:
    """Folder of the token cache that weights were trained on; an imported model has no section data and none."""
    data = source.configuration.get("data")
    if not isinstance(data, dict):
        raise ConfigError(f"{source.origin}: names no token cache")
    return data.get("cache") or default_cache()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
