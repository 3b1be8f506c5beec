"""A model's weights on disk: safetensors under the model's own names, replaced in one step."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically
from tinyllm_ray.model.llama import Llama


def save_weights(model: Llama, path: Path) -> None:
    """Write the weights of `model` to `path`, atomically."""
    weights = {name: weight.detach().contiguous().cpu() for name, weight in model.named_parameters()}
    write_atomically(path, save(weights, metadata={"format": "pt"}))


def load_weights(model: Llama, path: Path) -> None:
    """Fill `model` from `path`. Raises ConfigError when the file is missing, damaged or holds another model."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such checkpoint")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path}: damaged, or no checkpoint: {error}") from None
    wanted = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in wanted.items()}
    if {name: tuple(weight.shape) for name, weight in stored.items()} != shapes:
        raise ConfigError(f"{path}: holds another model than the configuration's {len(shapes)} weights")
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(stored[name])
