"""Configurations: what is allowed, what is refused and with which words, and what a recipe's identity covers."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.config import (
    Config,
    EvaluationConfig,
    identity,
    load,
    preset_names,
    validate,
)
from tinyllm_ray.errors import EXIT_USER, ConfigError
from tinyllm_ray.execution import default_micro_batch_size
from tinyllm_ray.sections import ModelConfig, OptimizerConfig, TrainingConfig

# Every field of a section, with a value that is not nano's and keeps the configuration valid.
OTHER_RECIPES: dict[str, dict[str, Any]] = {
    "model": {
        "layers": 3,
        "width": 128,
        "heads": 4,
        "ffn": 256,
        "context": 128,
        "vocab_size": 32_001,
        "rope_theta": 500_000,
        "norm_eps": 1e-6,
        "init_std": 0.03,
    },
    "data": {"shards_per_range": 1},
    "optimizer": {
        "peak_learning_rate": 0.001,
        "betas": [0.9, 0.99],
        "eps": 1e-7,
        "weight_decay": 0.0,
        "gradient_clip": "off",
    },
    "training": {
        "tokens_per_update": 4096,
        "tokens_per_parameter": 10,
        "token_budget": 2_000_000,
        "epochs": 9,
        "epoch_tokens_per_parameter": 0.25,
        "schedule": "warmup-stable-decay",
        "decay_fraction": 0.3,
        "warmup_fraction": 0.1,
        "final_fraction": 0.0,
        "seed": 43,
    },
    "evaluation": {"subset_blocks": 32, "subset_seed": 1},
    "packing": {"models": 2},
}
MIXED = {"models": 4, "topology": "complete", "scheme": "awc"}
ADAPTIVE = MIXED | {"consensus_start_fraction": 0.5, "consensus_power": 1.0}
OTHER_PACKS: dict[str, tuple[dict[str, Any], Any]] = {
    "topology": (MIXED, "one_peer_ring"),
    "scheme": (MIXED, "atc"),
    "consensus_start_fraction": (ADAPTIVE, 0.25),
    "consensus_power": (ADAPTIVE, 2.0),
    "variants": ({"models": 2}, [{"seed": 1}, {}]),
}
"""Settings that go with others alone: a pack, and another value in it."""
NO_CHANGE: dict[str, dict[str, Any]] = {
    "data": {"cache": "/somewhere"},
    "training": {"max_updates": 3},
    "execution": {
        "micro_batch_size": 2,
        "update": "compiled",
        "compile_mode": "max-autotune",
        "sdpa_backend": "math",
        "cpu_threads": 1,
        "prefetch_depth": 2,
        "deterministic": True,
        "loss_kernel": "triton",
        "norm_kernel": "triton",
        "rotary_kernel": "triton",
        "activation_kernel": "triton",
        "optimizer_kernel": "triton",
        "residual_dtype": "bfloat16",
        "recompute_activations": True,
        "packed_backward": "at_once",
    },
    "evaluation_execution": {"micro_batch_size": 16, "update": "compiled"},
    "output": {
        "checkpoint": "none",
        "checkpoint_interval": 100,
        "checkpoint_updates": [1, 10],
        "keep_checkpoints": None,
        "tensorboard": True,
    },
}
ONE_VALUE_ONLY = {("execution", "data_parallel")}


COMPANIONS = {"checkpoint_interval": {"checkpoint": "interval"}, "checkpoint_updates": {"checkpoint": "explicit"}}
"""What a setting is refused without."""


def nano(section: str, key: str, value: Any) -> Config:
    values = load("nano").model_dump(mode="json")
    values[section] |= {key: value, **COMPANIONS.get(key, {})}
    return validate(values, "test")


def nano_pack(packing: dict[str, Any]) -> Config:
    return validate(load("nano").model_dump(mode="json") | {"packing": packing}, "test")


def pairs(sections: dict[str, dict[str, Any]]) -> list[tuple[str, str, Any]]:
    return [(section, key, value) for section, keys in sections.items() for key, value in keys.items()]


def refusal(source: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    assert caught.value.exit_status == EXIT_USER
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


# Presets


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("20m", 20_403_520),
        ("20m-32k", 20_403_520),
        ("50m", 48_507_392),
        ("90m", 91_605_120),
        ("250m", 251_943_360),
        ("500m", 516_814_080),
    ],
)
def test_parameters_to_the_unit(preset: str, parameters: int) -> None:
    assert load(preset).model.parameters == parameters


def test_nano_has_about_two_million_parameters() -> None:
    assert 1_900_000 < load("nano").model.parameters < 2_300_000
    assert load("nano").model.context == 256
    assert load("nano").training.tokens_per_update == 2048


@pytest.mark.parametrize("preset", ["250m", "500m"])
def test_an_untuned_preset_stands_to_a_published_fit_as_the_tuned_one_does(preset: str) -> None:
    """Rate and batch of Li et al., arXiv 2503.04715; the batch is the nearest power of two."""

    def fitted_rate(config: Config) -> float:
        weights = config.model.parameters - config.model.vocab_size * config.model.width
        return float(1.79 * weights**-0.713 * config.token_budget**0.307)

    config, tuned = load(preset), load("20m")
    ratio = tuned.optimizer.peak_learning_rate / fitted_rate(tuned)
    assert config.optimizer.peak_learning_rate == pytest.approx(ratio * fitted_rate(config), rel=0.05)
    assert config.training.tokens_per_update == 2 ** round(math.log2(0.58 * config.token_budget**0.571))


def test_presets_are_listed_by_size() -> None:
    packs = ["packed-20m-adaptive", "packed4-20m-atc", "packed4-20m-awc", "packed8-20m-awc"]
    assert preset_names() == ["nano", "20m", "20m-32k", *packs, "50m", "90m", "250m", "500m"]


@pytest.mark.parametrize("preset", preset_names())
def test_a_configuration_written_and_read_is_the_same(preset: str, path: Path) -> None:
    config = load(preset, ["optimizer.gradient_clip=off", "execution.update=compiled", "data.cache='1e-4'"])
    path.write_text(config.to_yaml())
    assert load(path) == config
    assert load(path).recipe_identity == config.recipe_identity


def test_a_file_starts_from_a_preset_and_overrides_from_the_file(path: Path) -> None:
    path.write_text("preset: 20m\noptimizer: {betas: [0.8, 0.9]}\nexecution: {micro_batch_size: 16}\n")
    config = load(path, ["optimizer.weight_decay=0", "execution.micro_batch_size=4"])
    assert config.model == load("20m").model
    assert config.optimizer == OptimizerConfig(peak_learning_rate=0.0056, betas=(0.8, 0.9), weight_decay=0)
    assert config.execution.micro_batch_size == 4


def test_the_path_may_be_text_and_the_ending_is_free_if_the_file_is_there(tmp_path: Path) -> None:
    (tmp_path / "recipe").write_text("preset: nano\n")
    assert load(str(tmp_path / "recipe")) == load("nano")


# What is refused


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("optimizer: {learning-rate: 1}", "optimizer.learning-rate", "optimizer.peak_learning_rate"),
        ("optimizer: {peak-learning-rate: 1}", "optimizer.peak-learning-rate", "optimizer.peak_learning_rate"),
        ("optimizer: {lr: 1}", "optimizer.lr", "optimizer.peak_learning_rate"),
        ("lr: 0.1", "lr", "optimizer.peak_learning_rate"),
        ("learning-rate: 0.1", "learning-rate", "optimizer.peak_learning_rate"),
        ("peak_learning_rate: 0.1", "peak_learning_rate", "optimizer.peak_learning_rate"),
        ("model: {peak_learning_rate: 1}", "model.peak_learning_rate", "optimizer.peak_learning_rate"),
        ("training: {micro_batch_size: 8}", "training.micro_batch_size", "execution.micro_batch_size"),
        ("execution: {micro_batchsize: 8}", "execution.micro_batchsize", "execution.micro_batch_size"),
        ("micro_batchsize: 8", "micro_batchsize", "execution.micro_batch_size"),
        ("train: {seed: 1}", "train", "training"),
        ("optimiser: {eps: 1}", "optimiser", "optimizer"),
    ],
)
def test_unknown_keys_are_named_with_their_nearest_match(path: Path, text: str, key: str, nearest: str) -> None:
    path.write_text(f"preset: nano\n{text}\n")
    message = refusal(path)
    assert message.startswith(f"{path}: {key}: there is no such key; did you mean {nearest}? (allowed here: ")


def test_a_key_like_no_other_gets_the_list_of_what_is_allowed(path: Path) -> None:
    path.write_text("preset: nano\noutput: {xyz: 1}\n")
    allowed = "checkpoint, checkpoint_interval, checkpoint_updates, keep_checkpoints, tensorboard"
    assert refusal(path) == f"{path}: output.xyz: there is no such key (allowed here: {allowed})"


NUMBERS = [
    "model.layers",
    "model.width",
    "model.norm_eps",
    "optimizer.peak_learning_rate",
    "optimizer.gradient_clip",
    "training.token_budget",
    "training.warmup_fraction",
    "training.max_updates",
    "training.seed",
    "evaluation.subset_seed",
    "execution.micro_batch_size",
    "execution.cpu_threads",
    "execution.data_parallel",
]


@pytest.mark.parametrize(
    "value", ["true", "false", ".nan", ".inf", "-.inf", "nan", "1e400", "off", "no", "[1]", "{}", "''"]
)
@pytest.mark.parametrize("key", NUMBERS)
def test_what_is_no_number_is_refused_with_key_and_value(key: str, value: str) -> None:
    if (key, value) == ("optimizer.gradient_clip", "off"):
        assert load("nano", [f"{key}={value}"]).optimizer.gradient_clip is None
    else:
        assert refusal("nano", f"{key}={value}").startswith(f"preset nano with --set: {key}: ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.layers=0", "0 is not allowed: input should be greater than 0"),
        ("model.layers=2.5", "2.5 is not allowed"),
        ("optimizer.peak_learning_rate=-1e-3", "-0.001 is not allowed: input should be greater than 0"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1: 1 is not allowed: input should be less than 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
        ("training.warmup_fraction=5%", "'5%' is not allowed"),
        ("training.warmup_fraction=1.5", "1.5 is not allowed: input should be less than or equal to 1"),
        ("execution.update=fast", "'fast' is not allowed: input should be 'eager', 'compiled' or 'graph'"),
        ("execution.update=off", "'off' is not allowed"),
        ("execution.update=[eager, graph]", "['eager', 'graph'] is not allowed"),
        ("execution.compile_mode=[default]", "['default'] is not allowed"),
        ("execution.update={graph: true}", "execution.update: input should be 'eager'"),
        ("model.layers=1000000000000", "input should be less than or equal to 10000"),
        ("model.vocab_size=4611686018427387904", "input should be less than or equal to"),
        (f"training.token_budget={10**400}", "input should be less than or equal to 1000000000000000000"),
        ("training.tokens_per_parameter=1e308", "input should be less than or equal to 1000000000"),
        ("execution.loss_kernel=cuda", "'cuda' is not allowed: input should be 'torch' or 'triton'"),
        ("execution.compile_mode=off", "'off' is not allowed: input should be 'default', 'reduce-overhead'"),
        ("execution.sdpa_backend=no", "'no' is not allowed: input should be 'auto'"),
        ("execution.data_parallel=2", "2 is not allowed: input should be 1"),
        ("execution.deterministic='false'", "'false' is not allowed: input should be true or false"),
        ("optimizer.peak_learning_rate=1e39", "1e+39 is not allowed: input should be less than or equal to 1"),
        ("output.checkpoint_updates=[0]", "0 is not allowed: input should be greater than 0"),
        ("data.cache=''", "'' is not allowed: string should have at least 1 character"),
        ("training.seed=99999999999999999999999", "input should be less than 9223372036854776000"),
        ("execution.deterministic=yes", "'yes' is not allowed: input should be true or false"),
        (
            "execution.prefetch_depth=1000000000",
            "1000000000 is not allowed: input should be less than or equal to 1024",
        ),
        ("execution.cpu_threads=1000000", "1000000 is not allowed: input should be less than or equal to 1024"),
        ("data.cache=3", "3 is not allowed: input should be a valid string"),
    ],
)
def test_values_are_refused_with_what_is_allowed(override: str, words: str) -> None:
    assert words in refusal("nano", override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=3", "model: width 64 must be heads (3) times an even number of features"),
        ("model.width=66", "model: width 66 must be heads (2) times an even number of features"),
        ("training.tokens_per_update=1000", "training.tokens_per_update 1000 must be a multiple of model.context 256"),
        ("execution.micro_batch_size=3", "execution.micro_batch_size 3 must divide the 8 rows of an update"),
        ("execution.micro_batch_size=16", "execution.micro_batch_size 16 must divide the 8 rows of an update"),
    ],
)
def test_what_does_not_divide_is_refused(override: str, words: str) -> None:
    assert words in refusal("nano", override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["output.checkpoint=interval"], "checkpoint interval needs output.checkpoint_interval, like 1000"),
        (["output.checkpoint=explicit"], "checkpoint explicit needs output.checkpoint_updates, like [100, 1000]"),
        (["output.checkpoint_interval=5"], "checkpoint_interval goes with checkpoint interval, not final"),
        (
            ["output.checkpoint=explicit", "output.checkpoint_updates=[]"],
            "checkpoint explicit needs output.checkpoint_updates",
        ),
        (
            ["training.schedule=warmup-stable-decay", "training.warmup_fraction=0.9"],
            "warmup_fraction 0.9 and decay_fraction 0.2 sum up to more than 1",
        ),
        (
            ["training.schedule=warmup-stable-decay", "training.decay_fraction=0"],
            "decay_fraction 0 never reaches final_fraction 0.1; take final_fraction 1 to stay at the peak",
        ),
        (["execution.deterministic=true", "execution.sdpa_backend=cudnn"], "deterministic forbids sdpa_backend cudnn"),
        (
            ["execution.deterministic=true", "execution.update=compiled", "execution.compile_mode=max-autotune"],
            "deterministic forbids compile_mode max-autotune, which chooses kernels by their timing",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], words: str) -> None:
    assert words in refusal("nano", *overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("- 1", "the file is a list"),
        ("preset: 30m", "preset: '30m' is not one of nano, 20m"),
        ("preset: [nano]", "preset: ['nano'] is not one of nano, 20m"),
        ("preset: nano\nmodel: 3", "model: 3 is not allowed"),
        ("preset: nano\nmodel:", "model: None is not allowed"),
        ("model: {layers: 2}", "model.width is missing (and 4 more)"),
        ("preset: nano\noptimizer:\n  eps: 1e-8\n  eps: 1e-8", "line 4: the key 'eps' stands twice"),
    ],
)
def test_files_are_refused_by_name(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert words in message


def test_sources_that_are_nothing() -> None:
    assert f"neither a preset ({', '.join(preset_names())}) nor a YAML file" in refusal("30m")
    assert refusal("absent.yaml") == "absent.yaml: no such file"


@pytest.mark.parametrize(
    "override", ["", "layers=3", "model=3", "model.layers", "model.=3", ".layers=3", "model.a.b=3"]
)
def test_overrides_have_a_section_a_key_and_a_value(override: str) -> None:
    assert refusal("nano", override).startswith(f"--set {override!r} is not section.key=value")


def test_an_override_cannot_go_into_what_is_no_section(path: Path) -> None:
    path.write_text("preset: nano\nmodel: 3\n")
    assert "model is not a section" in refusal(path, "model.layers=3")


def test_override_values_are_yaml() -> None:
    config = load(
        "nano",
        [
            "optimizer.peak_learning_rate=1e-4",
            "optimizer.betas=[0.8, 9e-1]",
            "data.cache=a=b",
            "training.max_updates=~",
        ],
    )
    assert config.optimizer.peak_learning_rate == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.data.cache == "a=b"
    assert config.training.max_updates is None
    assert "this is no YAML" in refusal("nano", "model.layers=[")


# Identity


@pytest.mark.parametrize(("section", "key", "value"), pairs(OTHER_RECIPES))
def test_every_field_of_the_recipe_changes_its_identity(section: str, key: str, value: Any) -> None:
    assert nano(section, key, value).recipe_identity != load("nano").recipe_identity


@pytest.mark.parametrize("key", OTHER_PACKS)
def test_every_field_of_a_pack_changes_its_identity(key: str) -> None:
    pack, other = OTHER_PACKS[key]
    assert nano_pack(pack).recipe_identity != nano_pack(pack | {key: other}).recipe_identity


@pytest.mark.parametrize(("section", "key", "value"), pairs(NO_CHANGE))
def test_nothing_else_changes_it(section: str, key: str, value: Any) -> None:
    other = nano(section, key, value)
    assert other != load("nano") or key == "compile_mode"
    assert other.recipe_identity == load("nano").recipe_identity


def test_the_tables_above_cover_every_field() -> None:
    known = {(section, key) for section, key, _ in pairs(OTHER_RECIPES) + pairs(NO_CHANGE)} | ONE_VALUE_ONLY
    known |= {("packing", key) for key in OTHER_PACKS}
    fields = {
        (section, key)
        for section, field in Config.model_fields.items()
        if section != "tuned"  # no setting, but what is known of them: tests/test_promise.py
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }
    assert known == fields


def test_an_identity_does_not_depend_on_how_a_value_is_written(path: Path) -> None:
    path.write_text(
        "preset: nano\noptimizer: {weight_decay: 1e-1, gradient_clip: 1}\ntraining: {token_budget: 1048576.0}\n"
    )
    assert load(path).recipe_identity == load("nano").recipe_identity
    assert identity({"a": 1, "b": [2]}) == identity({"b": [2], "a": 1})
    assert identity({"a": 1}) != identity({"a": "1"})


# Execution


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"update": "compiled"}, "default"),
        ({"update": "compiled", "compile_mode": None}, "default"),
        ({"update": "compiled", "compile_mode": "max-autotune"}, "max-autotune"),
        ({"update": "eager", "compile_mode": "max-autotune"}, None),
        ({"update": "graph"}, "default"),
        ({"update": "graph", "compile_mode": "max-autotune-no-cudagraphs"}, "max-autotune-no-cudagraphs"),
        ({"compile_mode": "max-autotune"}, None),
    ],
)
def test_the_compile_mode_counts_only_where_something_is_compiled(settings: dict[str, Any], mode: str | None) -> None:
    assert load("nano").with_execution(settings).execution.compile_mode == mode


def test_other_settings_keep_the_rest() -> None:
    first = load("nano", ["execution.cpu_threads=1"]).with_execution({"micro_batch_size": 4})
    assert (first.execution.cpu_threads, first.execution.micro_batch_size) == (1, 4)
    assert first.recipe_identity == load("nano").recipe_identity
    with pytest.raises(ConfigError, match="there is no such key"):
        first.with_execution({"layers": 3})
    with pytest.raises(ConfigError, match="must divide"):
        first.with_execution({"micro_batch_size": 3})


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load("nano").model.layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(("rows", "size"), [(128, 32), (32, 32), (48, 16), (8, 8), (24, 8), (12, 12), (7, 7), (1, 1)])
def test_the_default_micro_batch(rows: int, size: int) -> None:
    assert default_micro_batch_size(rows) == size


@given(context=st.sampled_from([64, 256, 1024]), rows=st.integers(1, 200), data=st.data())
def test_micro_batches_make_up_the_update(context: int, rows: int, data: st.DataObject) -> None:
    divisors = [None, *(size for size in range(1, rows + 1) if rows % size == 0)]
    config = Config(
        model=ModelConfig(layers=1, width=4, heads=1, ffn=4, context=context),
        optimizer=OptimizerConfig(peak_learning_rate=0.1, betas=(0.9, 0.9)),
        training=TrainingConfig(tokens_per_update=context * rows),
        evaluation=EvaluationConfig(),
    ).with_execution({"micro_batch_size": data.draw(st.sampled_from(divisors))})
    assert config.accumulation * config.micro_batch_size == config.rows_per_update == rows


def test_the_token_budget_is_exact() -> None:
    assert load("20m").token_budget == 20 * 20_403_520
    assert load("20m", ["training.tokens_per_parameter=0.1"]).token_budget == Fraction(1, 10) * 20_403_520
    assert load("nano").token_budget == 1_048_576
