from pathlib import Path
from typing import Any

import pytest
import yaml

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.search.space import EXECUTION_KEYS, Space, load_space, parse_space, space_names

BASE: dict[str, Any] = {"baseline": {"update": "compiled"}}


@pytest.mark.parametrize("name", ["execution", "packed", "smoke"])
def test_shipped_spaces_load_and_survive_json(name: str) -> None:
    space = load_space(name)
    assert space.name == name
    assert Space.model_validate_json(space.model_dump_json()) == space
    assert Space.model_validate(space.model_dump(mode="json")) == space


def test_the_shipped_names() -> None:
    assert space_names() == ["execution", "packed", "smoke"]


def test_execution_space_is_the_one_of_the_design() -> None:
    space = load_space("execution")
    assert (space.baseline.update, space.baseline.compile_mode, space.baseline.sdpa_backend) == (
        "compiled",
        "default",
        "auto",
    )
    assert space.baseline.micro_batch_size is None
    assert space.factors["micro_batch_size"] == (4, 8, 16, 32, 64, 128)
    assert space.factors["update"] == ("eager", "compiled", "graph")
    kernels = {key for key, values in space.factors.items() if values == ("torch", "triton")}
    assert kernels == {key for key in EXECUTION_KEYS if key.endswith("_kernel")}
    assert {getattr(space.baseline, key) for key in kernels} == {"torch"}
    assert space.factors["residual_dtype"] == ("float32", "bfloat16")
    assert space.when == {"compile_mode": {"update": ("compiled", "graph")}}
    protocol = space.protocol
    assert (protocol.warmup_updates, protocol.windows, protocol.updates_per_window) == (20, 3, 100)


def test_smoke_space_is_short_and_eager_first() -> None:
    space = load_space("smoke")
    assert space.baseline.update == "eager"
    protocol = space.protocol
    assert (protocol.warmup_updates, protocol.windows, protocol.updates_per_window) == (2, 3, 5)


def test_a_file_lends_its_name_and_keeps_words_that_yaml_might_take_for_booleans(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("baseline: {update: eager}\nfactors: {compile_mode: [off, default]}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: factors\.compile_mode: 'off' is not allowed.*'default'.*eager"):
        load_space(path)
    path.write_text("baseline: {update: eager}\nfactors: {update: [eager, compiled]}\nwhen: {}\n")
    assert load_space(str(path)).name == "mine"


def test_a_space_not_found_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"'executoin'.*\(execution, packed, smoke\)"):
        load_space("executoin")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*\(execution, packed, smoke\)"):
        load_space(Path("nowhere.yaml"))


def test_values_keep_their_type() -> None:
    space = parse_space(BASE | {"factors": {"micro_batch_size": ["8", None, 4.0], "compile_mode": [None]}}, "here")
    assert space.factors == {"micro_batch_size": (8, None, 4), "compile_mode": (None,)}
    assert [type(value) for value in space.factors["micro_batch_size"]] == [int, type(None), int]


def test_a_condition_may_be_one_value_or_several() -> None:
    values = BASE | {
        "factors": {"cpu_threads": [1, 2]},
        "when": {"cpu_threads": {"update": "eager", "sdpa_backend": ["math", "flash"]}},
    }
    assert parse_space(values, "here").when == {
        "cpu_threads": {"update": ("eager",), "sdpa_backend": ("math", "flash")}
    }


GOOD_FACTORS = {"factors": {"update": ["eager", "compiled"]}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, r"empty space"),
    (GOOD_FACTORS, r"baseline is missing"),
    (BASE | {"factors": None}, r"empty space: factors names nothing"),
    (BASE | {"factors": {}}, r"empty space: factors names nothing"),
    (BASE | {"factors": {"update": []}}, r"empty space: factors\.update is an empty list"),
    (BASE | {"factors": {"update": None}}, r"factors\.update: None is not a list"),
    (BASE | {"factors": {"update": "eager"}}, r"factors\.update: 'eager' is not a list; write \[eager\]"),
    (BASE | {"factors": ["update"]}, r"factors: \['update'\] is not a mapping"),
    (
        BASE | {"factors": {"update": ["eager", "fast"]}},
        r"factors\.update: 'fast' is not allowed.*'eager', 'compiled' or 'graph'",
    ),
    (BASE | {"factors": {"compile_mode": [False]}}, r"factors\.compile_mode: False is not allowed"),
    (BASE | {"factors": {"compile_mode": ["default", "off"]}}, r"'off' is not allowed.*'max-autotune'.*update: eager"),
    (BASE | {"factors": {"micro_batch_size": [8, 0]}}, r"factors\.micro_batch_size: 0 is not allowed.*greater than 0"),
    (BASE | {"factors": {"cpu_threads": [True]}}, r"factors\.cpu_threads: True is not allowed"),
    (BASE | {"factors": {"cpu_threads": [[1]]}}, r"factors\.cpu_threads: \[1\] is not allowed"),
    (BASE | {"factors": {"packed_backward": ["both"]}}, r"packed_backward: 'both' is not.*'one_by_one' or 'processes'"),
    (BASE | {"factors": {"models": [2]}}, r"factors\.models: packing\.models belongs to the recipe.*packed_backward"),
    (BASE | {"factors": {"data_parallel": [2]}}, r"factors\.data_parallel: 2 is not allowed.*1"),
    (BASE | {"factors": {"update": ["eager", "eager"]}}, r"factors\.update: 'eager' stands twice"),
    (BASE | {"factors": {"micro_batch_size": [8, "8"]}}, r"factors\.micro_batch_size: '8' stands twice"),
    (BASE | {"factors": {"micro-batch": [8]}}, r"factors\.micro-batch: there is no such.*mean micro_batch_size\?"),
    (BASE | {"factors": {"execution.update": ["eager"]}}, r"did you mean update\?"),
    (BASE | {"factor": {"update": ["eager"]}}, r"factor: there is no such key; did you mean factors\?"),
    (BASE | GOOD_FACTORS | {"protocol": {"warmup": 2}}, r"protocol\.warmup: .*did you mean protocol\.warmup_updates\?"),
    (BASE | GOOD_FACTORS | {"protocol": {"windows": 0}}, r"protocol\.windows: 0 is not allowed"),
    (GOOD_FACTORS | {"baseline": {"sdpa": "math"}}, r"baseline\.sdpa: .*did you mean sdpa_backend\?"),
    (GOOD_FACTORS | {"baseline": {"sdpa_backend": "fast"}}, r"baseline\.sdpa_backend: 'fast' is not allowed"),
    (BASE | {"update": ["eager"]}, r"update: an execution key stands under factors"),
    (BASE | GOOD_FACTORS | {"when": {"mode": {"update": "eager"}}}, r"when\.mode: .*no such execution key"),
    (BASE | GOOD_FACTORS | {"when": {"compile_mode": "compiled"}}, r"when\.compile_mode: 'compiled' is not a mapping"),
    (
        BASE | GOOD_FACTORS | {"when": {"compile_mode": {"update": "grap"}}},
        r"when\.compile_mode\.update: 'grap' is not",
    ),
    (BASE | GOOD_FACTORS | {"when": {"compile_mode": {"update": []}}}, r"an empty list never holds"),
    (
        BASE | GOOD_FACTORS | {"when": {"update": {"sdpa_backend": "math"}, "sdpa_backend": {"update": "eager"}}},
        r"update needs sdpa_backend needs update",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_bad_spaces_are_refused_with_what_to_change(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_space(values, "space.yaml")
    assert str(caught.value).startswith("space.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("tokens_per_update", "training.tokens_per_update"),
        ("peak_learning_rate", "optimizer.peak_learning_rate"),
        ("training.seed", "training.seed"),
        ("model", "model"),
        ("layers", "model.layers"),
    ],
)
@pytest.mark.parametrize("section", ["factors", "baseline", "when", None])
def test_recipe_keys_are_refused_wherever_they_stand(key: str, place: str, section: str | None, tmp_path: Path) -> None:
    values: dict[str, Any] = {"baseline": {"update": "eager"}, "factors": {"update": ["eager"]}, "when": {}}
    (values[section] if section else values)[key] = {"update": "eager"} if section == "when" else [1]
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=f"{place} belongs to the recipe") as caught:
        load_space(path)
    assert all(key in str(caught.value) for key in EXECUTION_KEYS)
    assert str(path) in str(caught.value)
