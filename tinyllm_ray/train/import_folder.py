"""A Llama that transformers saved as our model: config.json and safetensors in, weights under our names out."""

import json
import shlex
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically
from tinyllm_ray.model.huggingface import Weights, from_llama_config, from_transformers
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.export import CONFIG_JSON, SINGLE_FILE
from tinyllm_ray.train.new_folder import new_folder
from tinyllm_ray.yamlfile import dump_yaml

INDEX_FILE: Final = "model.safetensors.index.json"


def import_folder(folder: Path, out: Path) -> list[str]:
    """Write the model of transformers' folder `folder` into the folder `out` and return lines that say what is there.

    `out` then holds config.yaml with the section `model`, and model.safetensors under our names, in float32. Raises
    ConfigError as `import_model` does, and where `out` is not empty or cannot be written.
    """
    config, weights = import_model(folder)
    with new_folder(out) as temporary:
        write_atomically(temporary / "config.yaml", dump_yaml({"model": config.model_dump(mode="json")}).encode())
        write_atomically(temporary / SINGLE_FILE, save(weights, metadata={"format": "pt"}))
    lines = [f"{out / SINGLE_FILE} holds the weights, {out / 'config.yaml'} the section model that fits them"]
    if (folder / "tokenizer.json").is_file():
        tokenizer = shlex.quote(str(folder))
        lines.append(f"for its own tokens: python -m tinyllm_ray.data prepare --tokenizer {tokenizer} --source ...")
    return lines


def import_model(folder: Path) -> tuple[ModelConfig, Weights]:
    """The model in transformers' folder `folder`, its float32 weights under our names.

    Raises ConfigError where a file is missing or damaged, or this model cannot represent that one: see
    `from_llama_config` and `from_transformers`.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; one that holds {CONFIG_JSON} and {SINGLE_FILE} was expected")
    path = folder / CONFIG_JSON
    config = from_llama_config(_read_json(path), str(path))
    files = _weight_files(folder)
    tensors: Weights = {}
    for file in files:
        tensors |= _read_tensors(file)
    return config, from_transformers(tensors, config, str(files[0] if len(files) == 1 else folder))


def _weight_files(folder: Path) -> list[Path]:
    """The one file of all weights, else those that the index of a sharded model names."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index}: names no files under weight_map")
        for name in names.values():
            # Nothing outside the folder is read, whatever an index from elsewhere says.
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(f"{index}: {name!r} under weight_map is no safetensors file of the folder")
        return [folder / name for name in sorted(set(names.values()))]
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
    if pickles:
        raise ConfigError(
            f"{pickles[0]}: a pickle may run code when it is opened and is not read; save the model as {SINGLE_FILE}, "
            "as save_pretrained of transformers does"
        )
    raise ConfigError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_tensors(path: Path) -> Weights:
    try:
        tensors: Weights = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, but {INDEX_FILE} names it") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: damaged, or no safetensors: {error}") from None
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}; an object with keys was expected")
    return values
