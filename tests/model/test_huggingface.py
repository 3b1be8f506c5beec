"""Names, tensors and values of transformers' Llama: to them and back, and what cannot come back."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tinyllm_ray.config import load, preset_names
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.huggingface import from_llama_config, from_transformers, to_llama_config, to_transformers
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import ModelConfig

SHAPE = ModelConfig(layers=2, width=32, heads=4, ffn=48, context=16, vocab_size=61)
VALUES = to_llama_config(SHAPE)

positive = st.floats(min_value=1e-12, max_value=1e12)
shapes = st.builds(
    lambda heads, pairs, **others: ModelConfig(width=heads * pairs * 2, heads=heads, **others),
    heads=st.integers(1, 64),
    pairs=st.integers(1, 128),
    layers=st.integers(1, 200),
    ffn=st.integers(1, 20_000),
    context=st.integers(1, 10**6),
    vocab_size=st.integers(2, 10**6),
    rope_theta=positive,
    norm_eps=positive,
    init_std=st.floats(min_value=1e-6, max_value=1.0),
)


def weights_of(model: Llama) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def tensors(std: float = 0.3) -> dict[str, torch.Tensor]:
    """What transformers would have stored of a random model."""
    return to_transformers(weights_of(initialize(SHAPE.model_copy(update={"init_std": std}), seed=0)))


class TestConfig:
    @given(shapes)
    def test_comes_back_from_json_equal(self, config: ModelConfig) -> None:
        assert from_llama_config(json.loads(json.dumps(to_llama_config(config))), "config.json") == config

    @given(shapes)
    def test_comes_back_equal_from_what_transformers_makes_of_it(self, config: ModelConfig) -> None:
        theirs = json.loads(LlamaConfig(**to_llama_config(config)).to_json_string(use_diff=False))
        assert from_llama_config(theirs, "config.json") == config

    def test_names_no_special_token_where_none_is_known(self) -> None:
        theirs = LlamaConfig(**VALUES)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (None, None, None)

    def test_defaults_are_those_of_transformers(self) -> None:
        """Whatever a config.json leaves out means what LlamaConfig makes of it."""
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        given = {"model_type": "llama", "vocab_size": 61, "tie_word_embeddings": True, **shape}
        theirs = LlamaConfig(**given)
        assert from_llama_config(given, "config.json") == from_llama_config(theirs.to_dict(), "config.json")

    @pytest.mark.parametrize("preset", preset_names())
    def test_presets_become_models_of_as_many_parameters(self, preset: str) -> None:
        config = load(preset).model
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**to_llama_config(config)))
        assert sum(weight.numel() for weight in model.parameters()) == config.parameters

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 500.0},
            {"rope_theta": 500.0, "rope_scaling": None},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
            {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500, "type": "default", "factor": None}},
        ],
    )
    def test_rope_theta_is_found_in_all_its_spellings(self, rope: dict[str, Any]) -> None:
        without = {key: value for key, value in VALUES.items() if key != "rope_theta"}
        assert from_llama_config(without | rope, "config.json").rope_theta == 500.0
        assert from_llama_config(without, "config.json").rope_theta == 10_000.0

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model_type": "qwen2"}, "model_type 'qwen2' cannot be represented: it is another architecture"),
            ({"model_type": None}, "model_type None"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "architectures .*no plain language model"),
            ({"num_key_value_heads": 2}, "num_key_value_heads 2 cannot be represented.*only 4 can"),
            ({"head_dim": 16}, "head_dim 16 cannot be represented.*only 8 can"),
            ({"attention_bias": True}, "attention_bias True"),
            ({"mlp_bias": True}, "mlp_bias True"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*SwiGLU.*only 'silu'"),
            ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
            ({"tie_word_embeddings": None}, "tie_word_embeddings False"),
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config .*gptq.*only none can"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .*linear.*scaled"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling .*llama3"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters .*yarn"),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters .*full_attention"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters .*0.5"),
            ({"rope_scaling": "linear"}, "rope_scaling 'linear'"),
            ({"rope_parameters": {"rope_theta": 5e5}}, r"rope_theta has several values, \[10000.0, 500000.0\]"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
            ({"hidden_size": None}, "hidden_size is missing"),
            ({"hidden_size": 30, "head_dim": None}, "width 30 must be heads"),
            ({"hidden_size": "wide"}, "width: 'wide' is not allowed"),
            ({"rms_norm_eps": True}, "norm_eps: True is not allowed"),
            ({"rope_theta": [1]}, "rope_theta: .1. is not allowed"),
        ],
    )
    def test_refuses_on_one_line_what_the_model_cannot_represent(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=f"^config.json: {words}") as refusal:
            from_llama_config(VALUES | change, "config.json")
        assert "\n" not in str(refusal.value)


class TestWeights:
    def test_names_and_shapes_are_those_of_transformers(self) -> None:
        theirs = LlamaForCausalLM(LlamaConfig(**VALUES)).state_dict()
        del theirs["lm_head.weight"]
        ours = tensors()
        assert {name: tensor.shape for name, tensor in ours.items()} == {
            name: tensor.shape for name, tensor in theirs.items()
        }

    def test_come_back_bit_for_bit_in_the_models_order(self) -> None:
        weights = weights_of(initialize(SHAPE, seed=0))
        back = from_transformers(to_transformers(weights), SHAPE, "folder")
        assert list(back) == list(weights)
        for name, weight in weights.items():
            assert torch.equal(back[name], weight), name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_ones_become_float32_of_the_same_value(self, dtype: torch.dtype) -> None:
        stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
        back = from_transformers(stored, SHAPE, "folder")
        assert {weight.dtype for weight in back.values()} == {torch.float32}
        again = to_transformers(back)
        for name, tensor in stored.items():
            assert torch.equal(again[name].double(), tensor.double()), name

    def test_what_follows_from_the_others_may_be_stored_as_well(self) -> None:
        stored = tensors()
        more = {
            "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        }
        assert from_transformers(stored | more, SHAPE, "folder").keys() == weights_of(initialize(SHAPE, 0)).keys()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model.norm.weight": None}, "model.norm.weight is missing;"),
            (
                {"model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None},
                r"model.layers.1.mlp.up_proj.weight is missing \(and 1 more\)",
            ),
            (
                {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
                "model.layers.0.self_attn.q_proj.bias has no place",
            ),
            ({"model.layers.2.input_layernorm.weight": torch.ones(32)}, "model.layers.2.input_layernorm.weight has no"),
            (
                {"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 32)},
                r"model.layers.0.self_attn.k_proj.weight is \[16, 32\], \[32, 32\] expected",
            ),
            (
                {"model.embed_tokens.weight": torch.zeros(64, 32)},
                r"model.embed_tokens.weight is \[64, 32\], \[61, 32\]",
            ),
            ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "model.norm.weight is torch.int8; only float32"),
            ({"model.norm.weight": torch.ones(32, dtype=torch.float64)}, "model.norm.weight is torch.float64"),
            ({"lm_head.weight": torch.zeros(61, 32)}, "lm_head.weight is not the embedding"),
            ({"lm_head.weight": torch.zeros(60, 32)}, "lm_head.weight is not the embedding"),
        ],
    )
    def test_refuses_on_one_line_tensors_that_do_not_fit(
        self, change: dict[str, torch.Tensor | None], words: str
    ) -> None:
        stored = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
        with pytest.raises(ConfigError, match=f"^folder: {words}") as refusal:
            from_transformers(stored, SHAPE, "folder")
        assert "\n" not in str(refusal.value)


class TestLogits:
    """Equal logits prove the mapping: every mistake in the order of rows that is easily made moves them."""

    @staticmethod
    def difference(stored: dict[str, torch.Tensor]) -> float:
        """Largest absolute difference of logits in float64, of transformers with `stored` to ours."""
        theirs = LlamaForCausalLM(LlamaConfig(**VALUES))
        theirs.load_state_dict(stored, strict=False)
        ours = initialize(SHAPE.model_copy(update={"init_std": 0.1}), seed=0)
        tokens = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return float((theirs.double()(tokens).logits - ours.double()(tokens)).abs().max())

    def test_are_equal(self) -> None:
        assert self.difference(tensors(0.1)) < 1e-6

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("self_attn.q_proj", "self_attn.k_proj"),
            ("self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.v_proj", "self_attn.o_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ],
    )
    def test_move_where_two_matrices_are_swapped(self, one: str, other: str) -> None:
        stored = tensors(0.1)
        one, other = (f"model.layers.1.{name}.weight" for name in (one, other))
        assert self.difference(stored | {one: stored[other], other: stored[one]}) > 1e-4

    def test_move_where_positions_pair_neighbours_instead_of_halves(self) -> None:
        stored, heads = tensors(0.1), SHAPE.heads
        for name in ("q_proj", "k_proj"):
            name = f"model.layers.1.self_attn.{name}.weight"
            stored[name] = stored[name].unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        assert self.difference(stored) > 1e-4

    def test_move_where_layers_are_swapped(self) -> None:
        swapped = {
            name.replace("layers.0", "layers.x").replace("layers.1", "layers.0").replace("layers.x", "layers.1"): tensor
            for name, tensor in tensors(0.1).items()
        }
        assert self.difference(swapped) > 1e-4
