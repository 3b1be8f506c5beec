"""The model in the words of Hugging Face's Llama: names of weights, and the values of its config.json.

Pure mappings without files and without transformers. `LlamaForCausalLM` keeps apart what this model fuses: the rows of
`attention.qkv` are its query, key and value projections one after the other, those of `ffn.gate_up` its gate and up
projections. Features of a head are paired by the same halves in both (`operations.rotate`): no row changes its place.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from pydantic import ValidationError

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.validation import explain

Weights = dict[str, torch.Tensor]

ARCHITECTURE: Final = "LlamaForCausalLM"
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_ROTARY_TABLE: Final = ".rotary_emb.inv_freq"
"""End of a name: older versions of transformers stored these, which follow from rope_theta."""

_BLOCK: Final = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.down.weight": ("mlp.down_proj.weight",),
}
"""Our names inside a block, and the names of the equal parts that their rows are cut into."""

_FIELDS: Final = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
_DEFAULTS: Final[dict[str, Any]] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
"""LlamaConfig's own, for keys that a config.json leaves out; without the others there is no shape."""

_ONLY: Final[dict[str, tuple[Any, str]]] = {
    "model_type": ("llama", "it is another architecture"),
    "quantization_config": (None, "its weights are quantised"),
    "tie_word_embeddings": (True, "its output projection is not the embedding"),
    "hidden_act": ("silu", "its feed-forward is not SwiGLU"),
    "attention_bias": (False, "its attention has biases"),
    "mlp_bias": (False, "its feed-forward has biases"),
    "partial_rotary_factor": (1.0, "positions turn only a part of its features"),
}
"""The one value of a key that this model can represent, and what any other means."""

_PLAIN_ROPE: Final = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
"""What rope_parameters may say beside rope_theta."""


def to_llama_config(config: ModelConfig) -> dict[str, Any]:
    """The values of a config.json that make a `LlamaForCausalLM` of the same function.

    In the spelling that all versions of transformers from 4.50 on read: `torch_dtype` and `rope_theta` became `dtype`
    and `rope_parameters` in version 5, which still takes the older words. The ids of special tokens are null, since
    LlamaConfig's defaults are those of one tokenizer.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.heads,
        "head_dim": config.width // config.heads,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def from_llama_config(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The model that a config.json describes.

    Raises ConfigError naming `source`, the key and its value where a key is missing or this model cannot represent it.
    """
    given = _DEFAULTS | {key: value for key, value in values.items() if value is not None}
    for key, (allowed, meaning) in _ONLY.items():
        if given.get(key) != allowed:
            raise _refused(source, key, given.get(key), meaning, allowed)
    architectures = given.get("architectures", [ARCHITECTURE])
    if architectures != [ARCHITECTURE]:
        raise _refused(source, "architectures", architectures, "it is no plain language model", [ARCHITECTURE])
    missing = [theirs for theirs in _FIELDS.values() if theirs not in given]
    if missing:
        raise ConfigError(f"{source}: {missing[0]} is missing; the config.json of a Llama model names it")
    fields = {ours: given[theirs] for ours, theirs in _FIELDS.items()}
    try:
        config = ModelConfig.model_validate(fields | {"rope_theta": _rope_theta(given, source)})
    except ValidationError as error:
        raise ConfigError(explain(error, ModelConfig, source)) from None
    if given.get("num_key_value_heads", config.heads) != config.heads:
        meaning = f"heads share keys and values, {config.heads} heads in all"
        raise _refused(source, "num_key_value_heads", given["num_key_value_heads"], meaning, config.heads)
    features = config.width // config.heads
    if given.get("head_dim", features) != features:
        meaning = f"its heads are not the width {config.width} divided by {config.heads}"
        raise _refused(source, "head_dim", given["head_dim"], meaning, features)
    return config


def _refused(source: str, key: str, value: Any, meaning: str, allowed: Any) -> ConfigError:
    return ConfigError(
        f"{source}: {key} {value!r:.200} cannot be represented: {meaning}; "
        f"only {'none' if allowed is None else repr(allowed)} can, choose another model"
    )


def _rope_theta(given: Mapping[str, Any], source: str) -> Any:
    """The base of rotary positions, which transformers 5 writes into `rope_parameters` and version 4 beside it.

    Version 4 has anything but plain positions in `rope_scaling`; so has version 5 where it reads older files.
    """
    thetas = [given["rope_theta"]] if "rope_theta" in given else []
    for key in ("rope_parameters", "rope_scaling"):
        rope = given.get(key, {})
        settings = {name: value for name, value in rope.items() if value is not None} if isinstance(rope, dict) else {}
        if "rope_theta" in settings:
            thetas.append(settings.pop("rope_theta"))
        if not isinstance(rope, dict) or not settings.items() <= _PLAIN_ROPE.items():
            raise _refused(source, key, rope, "its positions are scaled", {"rope_type": "default"})
    if any(theta != thetas[0] for theta in thetas):
        raise ConfigError(f"{source}: rope_theta has several values, {thetas}; leave one")
    return thetas[0] if thetas else 10_000.0


def to_transformers(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Tensors under our names (weights, or their gradients) as `LlamaForCausalLM` names and splits them.

    What was fused comes as views of the same memory. Its `lm_head.weight` is left out: it is the embedding.
    """
    parts: Weights = {}
    for ours, theirs in _names(sum(name.endswith("attention.qkv.weight") for name in weights)):
        parts |= zip(theirs, weights[ours].chunk(len(theirs)), strict=True)
    return parts


def from_transformers(tensors: Mapping[str, torch.Tensor], config: ModelConfig, source: str) -> Weights:
    """The float32 weights of `config` under our names from those of a `LlamaForCausalLM`.

    Raises ConfigError naming `source` and the tensor that is missing, unexpected, of another shape, of a type other
    than float32, bfloat16 and float16, or an output projection that is not the embedding.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ROTARY_TABLE)}
    head = found.pop(_HEAD, None)
    with torch.device("meta"):
        wanted = to_transformers(dict(Llama(config).named_parameters()))
    _check_names(set(found), set(wanted), source)
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ConfigError(
                f"{source}: {name} is {list(tensor.shape)}, {list(wanted[name].shape)} expected from config.json"
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"{source}: {name} is {tensor.dtype}; only float32, bfloat16 and float16 are read")
    if head is not None and not torch.equal(head.float(), found[_EMBEDDING].float()):
        raise ConfigError(f"{source}: {_HEAD} is not the embedding, but this model has no other output projection")
    return {
        ours: torch.cat([found[name].float() for name in theirs]) if len(theirs) > 1 else found[theirs[0]].float()
        for ours, theirs in _names(config.layers)
    }


def _check_names(found: set[str], wanted: set[str], source: str) -> None:
    for names, what in ((wanted - found, "is missing"), (found - wanted, "has no place in this model")):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ConfigError(f"{source}: {min(names)} {what}{others}; it is no {ARCHITECTURE} of its config.json")


def _names(layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Our name of each weight, and theirs of its parts."""
    yield "embedding.weight", (_EMBEDDING,)
    for layer in range(layers):
        for ours, theirs in _BLOCK.items():
            yield f"blocks.{layer}.{ours}", tuple(f"model.layers.{layer}.{name}" for name in theirs)
    yield "norm.weight", ("model.norm.weight",)
