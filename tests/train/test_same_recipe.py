"""Which configurations may go on from a checkpoint, and how the others are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import CACHE, Training

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.checkpoint import Checkpoint, open_checkpoint
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.same_recipe import differences, refuse_other_recipe

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def config(tiny: MakeConfig) -> Config:
    return tiny()


@pytest.fixture(scope="module")
def saved(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint, which is as it was after every test."""
    trained = Training(config)
    return save_checkpoint(tmp_path_factory.mktemp("run"), 3, trained.model, trained.optimizer, {}, config, CACHE)


def refusal(saved: Path, config: Config, cache: str = CACHE) -> str:
    with pytest.raises(ConfigError) as error:
        refuse_other_recipe(open_checkpoint(saved), config, cache)
    message = str(error.value)
    assert message.startswith(f"{saved}: was written by another recipe: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"execution": {"micro_batch_size": 2, "update": "compiled", "prefetch_depth": 0}},
        {"evaluation_execution": {"micro_batch_size": 2}},
        {"output": {"checkpoint": "none", "keep_checkpoints": None}},
        {"data": {"cache": "/elsewhere"}},
        {"training": {"max_updates": 7}},
    ],
)
def test_what_is_not_the_recipe_may_differ(saved: Path, tiny: MakeConfig, change: dict[str, dict[str, Any]]) -> None:
    refuse_other_recipe(open_checkpoint(saved), tiny(**change), CACHE)


def test_every_setting_that_differs_is_named_with_both_values(saved: Path, tiny: MakeConfig) -> None:
    config = tiny(
        optimizer={"betas": [0.8, 0.95], "gradient_clip": None},
        training={"seed": 43, "max_updates": 3},
        evaluation={"subset_blocks": 9},
    )
    message = refusal(saved, config)
    for difference in (
        "optimizer.betas [0.9, 0.95], asked [0.8, 0.95]",
        "optimizer.gradient_clip 1.0, asked null",
        "training.seed 42, asked 43",
        "evaluation.subset_blocks 8, asked 9",
    ):
        assert difference in message
    assert message.count("asked") == 4


def test_another_token_cache_is_named_with_both_identities(saved: Path, config: Config) -> None:
    message = refusal(saved, config, "d" * 64)
    assert f"token cache {CACHE}, asked {'d' * 64}" in message
    assert message.count("asked") == 1


def test_settings_of_one_model_among_many_are_told_apart() -> None:
    """In one long list of sections the difference would be beyond what is shown."""

    def packing(*each: dict[str, Any]) -> dict[str, Any]:
        return {"packing": {"models": len(each), "scheme": None, "each": list(each)}}

    stored = packing({"seed": 1, "betas": [0.9, 0.95]}, {"seed": 2, "betas": None})
    asked = packing({"seed": 1, "betas": [0.8, 0.95]}, {"seed": 3, "betas": [0.9, 0.95]})
    assert list(differences(stored, asked)) == [
        "packing.each.0.betas [0.9, 0.95], asked [0.8, 0.95]",
        "packing.each.1.betas null, asked [0.9, 0.95]",
        "packing.each.1.seed 2, asked 3",
    ]
    assert list(differences(stored, stored)) == []
    fewer = [f"packing.each {json.dumps(stored['packing']['each'])[:57]}..., asked [{{", "packing.models 2, asked 1"]
    found = list(differences(stored, packing({"seed": 1, "betas": None})))
    assert [line[: len(start)] for line, start in zip(found, fewer, strict=True)] == fewer


def test_a_section_that_one_recipe_does_without_has_no_settings_there() -> None:
    packed = {"model": {"width": 32}, "packing": {"models": 2, "scheme": None}}
    assert list(differences({"model": {"width": 32}}, packed)) == ["packing.models null, asked 2"]
    assert list(differences(packed, {"model": {"width": 16}})) == [
        "model.width 32, asked 16",
        "packing.models 2, asked null",
    ]


def test_a_checkpoint_from_before_a_setting_existed_has_its_default(saved: Path, config: Config) -> None:
    manifest = open_checkpoint(saved).manifest
    training = {key: value for key, value in manifest.config["training"].items() if key != "schedule"}
    older = manifest.model_copy(
        update={"config": manifest.config | {"training": training}, "recipe_identity": "e" * 64}
    ).sealed()
    refuse_other_recipe(Checkpoint(saved, older), config, CACHE)


def test_a_checkpoint_with_a_setting_that_is_not_known_here_is_told(saved: Path, config: Config) -> None:
    manifest = open_checkpoint(saved).manifest
    later = manifest.model_copy(update={"config": manifest.config | {"mixing": {"every": 2}}}).sealed()
    with pytest.raises(ConfigError, match=r"checkpoint\.json: mixing") as error:
        refuse_other_recipe(Checkpoint(saved, later), config, CACHE)
    assert "\n" not in str(error.value)
