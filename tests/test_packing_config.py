"""Packs of models in a configuration: what an update's rows are, what is refused, which trainings they come to."""

from typing import Any

import pytest

from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import EXIT_USER, ConfigError
from tinyllm_ray.execution import default_packed_backward
from tinyllm_ray.sections import PackingConfig

MIXED = ["packing.models=4", "packing.topology=one_peer_ring", "packing.scheme=awc"]
COMPILED = ["execution.update=compiled"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load("nano", overrides)
    assert caught.value.exit_status == EXIT_USER
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("preset nano with --set: ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["packing.topology=complete"],
            "packing: models 1 has no use for topology; set models to 2 or more, or leave that out",
        ),
        (
            ["packing.scheme=awc", "packing.variants=[{}]"],
            "packing: models 1 has no use for scheme, variants; set models to 2 or more, or leave that out",
        ),
        (
            ["packing.models=2", "packing.topology=complete"],
            "packing: topology complete needs a scheme; take one of awc, atc",
        ),
        (
            ["packing.models=2", "packing.scheme=atc"],
            "packing: scheme atc needs a topology; take one of complete, one_peer_ring, one_peer_exponential",
        ),
        (
            [*MIXED, "packing.variants=[{}, {}, {}, {}]"],
            "packing: topology one_peer_ring mixes models of one recipe; leave out variants, or topology",
        ),
        (
            ["packing.models=3", "packing.variants=[{}, {}]"],
            "packing: variants has 2 entries, models is 3; give one for each model, {} for one with the recipe's own "
            "settings",
        ),
        (
            ["packing.models=2", "packing.consensus_start_fraction=0.5", "packing.consensus_power=1"],
            "packing: consensus_start_fraction needs models that are mixed; set topology and scheme as well",
        ),
        (
            [*MIXED, "packing.consensus_power=1"],
            "packing: consensus_start_fraction and consensus_power go together; set both, or neither",
        ),
        (
            ["packing.models=3", "packing.topology=complete", "packing.scheme=awc"],
            "packing.models 3 must divide the 8 rows of an update (training.tokens_per_update 2048 / model.context "
            "256), which they share",
        ),
        (
            [*MIXED, "execution.micro_batch_size=4"],
            "execution.micro_batch_size 4 must divide the 2 rows of a model in an update (training.tokens_per_update "
            "2048 / model.context 256 / packing.models 4)",
        ),
        (
            ["packing.models=2", "execution.micro_batch_size=16"],
            "execution.micro_batch_size 16 must divide the 8 rows of a model in an update "
            "(training.tokens_per_update 2048 / model.context 256)",
        ),
        (
            ["packing.models=2", *COMPILED, "execution.compile_mode=reduce-overhead"],
            "execution.compile_mode reduce-overhead replays CUDA graphs, which packed models do not; take default or "
            "max-autotune-no-cudagraphs",
        ),
        (
            ["packing.models=2", "execution.update=graph", "execution.packed_backward=processes"],
            "execution.update graph captures an update within one process; with packed_backward processes take update "
            "eager or compiled, or take packed_backward at_once or one_by_one",
        ),
        (["packing.topology=ring"], "packing.topology: 'ring' is not allowed: input should be 'complete', "),
        (["packing.models=0"], "packing.models: 0 is not allowed: input should be greater than 0"),
        (["packing.models=4097"], "packing.models: 4097 is not allowed: input should be less than or equal to 4096"),
        ([*MIXED, "packing.consensus_power=0"], "packing.consensus_power: 0 is not allowed"),
        (["packing.models=2", "packing.variants=[{}, {betas: [0.9, 1]}]"], "packing.variants.1.betas.1: 1 is not"),
        (
            ["packing.models=2", "packing.variants=[{}, {lr: 1}]"],
            "packing.variants.1.lr: there is no such key; did you mean optimizer.peak_learning_rate? (allowed here: "
            "seed, peak_learning_rate, betas, weight_decay)",
        ),
        (["execution.packed_backward=both"], "execution.packed_backward: 'both' is not allowed"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(overrides: list[str], message: str) -> None:
    assert refusal(*overrides).startswith(message)


def test_mixed_models_share_an_updates_rows() -> None:
    config = load("nano", [*MIXED, "execution.micro_batch_size=1"])
    assert (config.rows_per_update, config.rows_per_model, config.batch_rows) == (8, 2, 8)
    assert (config.accumulation, config.targets_per_update) == (2, 2048)


def test_models_apart_have_an_updates_rows_each() -> None:
    config = load("nano", ["packing.models=3"])
    assert (config.rows_per_update, config.rows_per_model, config.batch_rows) == (8, 8, 24)
    assert (config.micro_batch_size, config.accumulation, config.targets_per_update) == (8, 1, 3 * 2048)


@pytest.mark.parametrize("overrides", [[], MIXED, ["packing.models=3"]])
def test_the_budget_is_that_of_one_model(overrides: list[str]) -> None:
    config = load("20m", overrides)
    assert config.token_budget == 20 * 20_403_520


@pytest.mark.parametrize("power", ["off", "~"])
def test_consensus_may_be_off(power: str) -> None:
    config = load("nano", [*MIXED, f"packing.consensus_start_fraction={power}", f"packing.consensus_power={power}"])
    assert config == load("nano", MIXED)


def test_what_one_models_recipe_is_does_not_know_of_packs() -> None:
    assert "packing" not in load("nano").recipe
    assert load("nano", MIXED).recipe["packing"]["models"] == 4


@pytest.mark.parametrize("overrides", [MIXED, ["packing.models=2", "packing.variants=[{seed: 3, betas: [0, 0]}, {}]"]])
def test_a_pack_written_and_read_is_the_same(overrides: list[str], tmp_path: Any) -> None:
    config = load("nano", overrides)
    (tmp_path / "pack.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "pack.yaml") == config


def test_every_model_has_its_own_settings_or_none() -> None:
    variants = [{"seed": 0}, {"weight_decay": 0}]
    pack = PackingConfig.model_validate({"models": 2, "variants": variants})
    assert [own.model_dump(exclude_none=True) for own in pack.each] == variants
    assert [own.model_dump(exclude_none=True) for own in PackingConfig(models=2).each] == [{}, {}]


def test_large_micro_batches_pass_one_by_one_unless_asked_otherwise() -> None:
    assert [default_packed_backward(size) for size in (1, 16, 31, 32, 64)] == ["at_once"] * 3 + ["one_by_one"] * 2
    config = load("packed4-20m-awc")
    assert (config.micro_batch_size, config.packed_backward) == (32, "one_by_one")
    assert config.with_execution({"packed_backward": "at_once"}).packed_backward == "at_once"
    assert config.with_execution({"micro_batch_size": 16}).packed_backward == "at_once"


@pytest.mark.parametrize(
    ("preset", "models", "scheme", "rate", "betas"),
    [
        ("packed4-20m-awc", 4, "awc", 0.008, (0.95, 0.99)),
        ("packed4-20m-atc", 4, "atc", 0.0056, (0.9, 0.99)),
        ("packed8-20m-awc", 8, "awc", 0.0056, (0.95, 0.999)),
        ("packed-20m-adaptive", 4, "awc", 0.008, (0.95, 0.99)),
    ],
)
def test_presets_are_the_references(preset: str, models: int, scheme: str, rate: float, betas: Any) -> None:
    config: Config = load(preset)
    packing = config.packing
    assert config.model == load("20m").model
    assert (packing.models, packing.topology, packing.scheme) == (models, "one_peer_exponential", scheme)
    assert (config.optimizer.peak_learning_rate, config.optimizer.betas) == (rate, betas)
    assert config.targets_per_update == config.training.tokens_per_update == 131_072
    assert config.rows_per_model == 128 // models
    adaptive = (packing.consensus_start_fraction, packing.consensus_power)
    assert adaptive == ((0.5, 1) if preset == "packed-20m-adaptive" else (None, None))
