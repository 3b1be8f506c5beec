"""The section `tuned`: what a study knows of an execution changes neither what is trained nor how."""

from pathlib import Path
from typing import Any

import pytest
from promises import promised

from tinyllm_ray.config import load, validate
from tinyllm_ray.errors import ConfigError

NANO = load("nano")


def test_a_configuration_without_a_promise_does_not_mention_it() -> None:
    assert "tuned" not in NANO.to_yaml()
    assert "tuned" not in NANO.model_dump()


def test_a_promise_is_read_back_from_the_file_it_was_written_to(tmp_path: Path) -> None:
    config = promised(NANO, compiled={"file": "c07.compiled", "sha256": "0" * 64, "machine": "m", "source": "s"})
    (tmp_path / "selected.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "selected.yaml") == config


def test_it_belongs_to_no_identity() -> None:
    config = promised(NANO)
    assert config.recipe_identity == NANO.recipe_identity
    assert config.workload_identity == NANO.workload_identity
    assert config.execution == NANO.execution


def test_another_execution_is_promised_by_nobody() -> None:
    assert promised(NANO).with_execution({"micro_batch_size": 4}).tuned is None


@pytest.mark.parametrize(
    "setting",
    [
        "execution.micro_batch_size=4",
        "execution.cpu_threads=1",
        "model.ffn=256",
        "training.tokens_per_update=4096",
        "packing.models=2",
    ],
)
def test_what_an_update_costs_is_of_the_workload(setting: str) -> None:
    assert load("nano", [setting]).workload_identity != NANO.workload_identity


@pytest.mark.parametrize(
    "setting",
    [
        "training.seed=7",
        "training.token_budget=1000000",
        "training.max_updates=3",
        "optimizer.peak_learning_rate=0.1",
        "evaluation.subset_blocks=8",
        "data.cache=/elsewhere",
        "output.checkpoint=none",
    ],
)
def test_a_sweep_over_rates_and_seeds_keeps_its_workload(setting: str) -> None:
    assert load("nano", [setting]).workload_identity == NANO.workload_identity


def test_the_models_of_a_pack_may_have_rates_of_their_own() -> None:
    pack: dict[str, Any] = {"models": 2}
    values = NANO.model_dump(mode="json")
    alike = validate(values | {"packing": pack}, "test")
    apart = validate(values | {"packing": pack | {"variants": [{"seed": 1}, {"seed": 2}]}}, "test")
    assert alike.workload_identity == apart.workload_identity
    mixed = validate(values | {"packing": pack | {"topology": "complete", "scheme": "awc"}}, "test")
    assert mixed.workload_identity != alike.workload_identity


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"targets_per_second": 0}, "tuned.targets_per_second: 0 is not allowed: input should be greater than 0"),
        ({"target_per_second": 1}, "tuned.target_per_second: there is no such key; did you mean tuned.targets_per_sec"),
        ({"compiled": {"file": "x", "sha256": "abc", "machine": "m", "source": "s"}}, "tuned.compiled.sha256: 'abc'"),
    ],
)
def test_a_mistake_in_it_is_named(change: dict[str, Any], line: str) -> None:
    values = promised(NANO).model_dump(mode="json")
    with pytest.raises(ConfigError) as error:
        validate(values | {"tuned": values["tuned"] | change}, "selected.yaml")
    assert str(error.value).startswith(f"selected.yaml: {line}")
