"""The decoder against its own figures, the complex-number definition of its positions, and transformers' Llama."""

import math

import pytest
import torch
from torch.nn import functional

from tinyllm_ray.config import load, preset_names
from tinyllm_ray.model.huggingface import to_llama_config, to_transformers
from tinyllm_ray.model.llama import Llama, initialize, rotary_tables
from tinyllm_ray.model.operations import rotate
from tinyllm_ray.sections import ModelConfig

SHAPE = ModelConfig(layers=2, width=32, heads=4, ffn=48, context=16, vocab_size=61)
PARAMETERS = {
    "nano": 2_154_816,
    "20m": 20_403_520,
    "20m-32k": 20_403_520,
    "50m": 48_507_392,
    "90m": 91_605_120,
    "250m": 251_943_360,
    "500m": 516_814_080,
}


def double_model(seed: int = 0, std: float = 0.3) -> Llama:
    """Weights large enough that attention is far from uniform."""
    return initialize(SHAPE.model_copy(update={"init_std": std}), seed).double()


def random_tokens(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class TestParameters:
    @pytest.mark.parametrize("preset", preset_names())
    def test_presets_have_their_counts_to_the_unit(self, preset: str) -> None:
        config = load(preset).model
        with torch.device("meta"):
            model = Llama(config)
        one_model = PARAMETERS["20m" if preset.startswith("packed") else preset]
        assert sum(weight.numel() for weight in model.parameters()) == config.parameters == one_model

    def test_another_shape_counts_as_its_module_does(self) -> None:
        assert sum(weight.numel() for weight in double_model().parameters()) == SHAPE.parameters


class TestInitialization:
    def test_weights_depend_on_the_seed_alone(self) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = initialize(SHAPE, seed=7).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        again = initialize(SHAPE, seed=7).state_dict()
        other = initialize(SHAPE, seed=8).state_dict()
        for name, weight in first.items():
            assert torch.equal(weight, again[name]), name
            assert torch.equal(weight, other[name]) == (weight.ndim == 1), name

    @pytest.mark.parametrize("std", [0.02, 0.1])
    def test_matrices_have_the_spread_asked_for_and_scales_are_one(self, std: float) -> None:
        config = ModelConfig(layers=2, width=64, heads=4, ffn=192, vocab_size=256, init_std=std)
        for name, weight in initialize(config, seed=0).named_parameters():
            if weight.ndim == 1:
                assert torch.equal(weight, torch.ones_like(weight)), name
                continue
            # Five standard errors of a sample's mean and standard deviation.
            weight = weight.detach()
            assert abs(float(weight.mean())) < 5 * std / math.sqrt(weight.numel()), name
            assert float(weight.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel())), name

    def test_matrices_differ_from_one_another(self) -> None:
        first, second = initialize(SHAPE, seed=0).blocks
        assert not torch.equal(first.attention.qkv.weight, second.attention.qkv.weight)

    def test_nothing_is_left_unset(self) -> None:
        model = initialize(SHAPE, seed=0)
        cos, sin = rotary_tables(SHAPE.context, SHAPE.width // SHAPE.heads, SHAPE.rope_theta)
        assert torch.equal(model.cos, cos)
        assert torch.equal(model.sin, sin)


class TestRotary:
    @pytest.mark.parametrize("theta", [10_000.0, 500.0])
    def test_is_a_multiplication_by_complex_numbers_of_modulus_one(self, theta: float) -> None:
        context, features = 12, 8
        x = torch.randn(2, 3, context, features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        numbers = torch.complex(x[..., : features // 2], x[..., features // 2 :])
        turned = torch.empty_like(numbers)
        for position in range(context):
            for pair in range(features // 2):
                angle = position * theta ** (-2 * pair / features)
                turn = complex(math.cos(angle), math.sin(angle))
                turned[..., position, pair] = numbers[..., position, pair] * turn
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        found = rotate(x, *(table.double() for table in rotary_tables(context, features, theta)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # the tables are float32

    def test_tables_are_the_float32_nearest_to_the_exact_angles(self) -> None:
        cos, sin = rotary_tables(1024, 64, 10_000.0)
        angle = 1023 * 10_000.0 ** (-2 / 64)
        assert cos[1023, 1].item() == torch.tensor(math.cos(angle), dtype=torch.float64).float().item()
        assert sin[1023, 1].item() == torch.tensor(math.sin(angle), dtype=torch.float64).float().item()

    def test_scores_depend_on_distance_alone(self) -> None:
        features = 8
        generator = torch.Generator().manual_seed(0)
        query, key = torch.randn(2, features, dtype=torch.float64, generator=generator)
        cos, sin = (table.double() for table in rotary_tables(32, features, 100.0))

        def score(at: int, other: int) -> float:
            return float(rotate(query, cos[at], sin[at]) @ rotate(key, cos[other], sin[other]))

        assert score(20, 13) == pytest.approx(score(7, 0), abs=1e-6)
        assert abs(score(20, 12) - score(7, 0)) > 1e-3

    def test_keeps_the_dtype_of_its_input(self) -> None:
        x = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
        assert rotate(x, *rotary_tables(4, 8, 10_000.0)).dtype == torch.bfloat16


class TestForward:
    def test_a_token_changes_no_logits_before_it(self) -> None:
        model, tokens = double_model(), random_tokens(2, 16)
        before = model(tokens)
        for at in (1, 7, 15):
            changed = tokens.clone()
            changed[:, at] = (changed[:, at] + 1) % SHAPE.vocab_size
            after = model(changed)
            torch.testing.assert_close(after[:, :at], before[:, :at], rtol=1e-12, atol=1e-12)
            moved = (after - before).abs().amax(dim=(0, 2))[at:]
            assert moved.min() > 1e-6, "every later position sees the change"

    def test_rows_do_not_see_each_other(self) -> None:
        model, tokens = double_model(), random_tokens(3, 16)
        alone = torch.cat([model(row.unsqueeze(0)) for row in tokens])
        torch.testing.assert_close(model(tokens), alone, rtol=1e-12, atol=1e-12)

    def test_shorter_rows_are_allowed(self) -> None:
        model, tokens = double_model(), random_tokens(2, 16)
        torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=1e-12, atol=1e-12)

    def test_loss_of_a_fresh_model_is_near_that_of_a_uniform_guess(self) -> None:
        tokens = random_tokens(4, 17)
        loss = initialize(SHAPE, seed=0).loss(tokens[:, :-1], tokens[:, 1:])
        assert loss.item() == pytest.approx(math.log(SHAPE.vocab_size), abs=0.05)

    def test_loss_of_bfloat16_logits_is_taken_in_float32(self) -> None:
        model, tokens = initialize(SHAPE, seed=0).bfloat16(), random_tokens(4, 17)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        loss = model.loss(inputs, targets)
        assert loss.dtype == torch.float32
        logits = model(inputs).double().flatten(0, 1)
        assert loss.item() == pytest.approx(functional.cross_entropy(logits, targets.flatten()).item(), rel=1e-6)


TRANSFORMERS_TOLERANCE = 1e-6
"""Even in float64, transformers casts norms and angles to float32."""


def model_with_scales() -> Llama:
    """Scales other than one show a misplaced norm; matrices stay small, since larger ones make more of roundings."""
    model, generator = double_model(seed=3, std=0.1), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    """`LlamaForCausalLM` with the weights of `model_with_scales`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**to_llama_config(SHAPE), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).double()
    weights = to_transformers(dict(model_with_scales().named_parameters()))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, "tied to the embedding"
    assert not unexpected
    return model


def test_logits_are_those_of_transformers(theirs: torch.nn.Module) -> None:
    tokens = random_tokens(2, 16)
    with torch.no_grad():
        assert relative_error(model_with_scales()(tokens), theirs(tokens).logits) < TRANSFORMERS_TOLERANCE


def test_loss_and_gradients_are_those_of_transformers(theirs: torch.nn.Module) -> None:
    tokens = random_tokens(2, 17)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = model_with_scales()
    loss = model.loss(inputs, targets)
    loss.backward()
    theirs.zero_grad()
    expected = functional.cross_entropy(theirs(inputs).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TRANSFORMERS_TOLERANCE)
    found = to_transformers({name: weight.grad for name, weight in model.named_parameters()})
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(found[name], gradient) < TRANSFORMERS_TOLERANCE, name
