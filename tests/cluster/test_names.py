"""Trials are called what people call them."""

import pytest

from tinyllm_ray.cluster.names import trial_name
from tinyllm_ray.config import load


@pytest.mark.parametrize(
    ("source", "overrides", "size"),
    [
        ("20m-32k", [], "20m"),
        ("packed8-20m-awc", [], "20m"),
        ("500m", [], "500m"),
        ("nano", [], "nano"),
        ("20m", ["model.layers=9"], "21.7M"),
    ],
)
def test_a_trial_is_named_for_the_models_size_and_its_execution(source: str, overrides: list[str], size: str) -> None:
    model = load(source, overrides).model.model_dump(mode="json")
    assert trial_name(model, "mb32 graph cudnn t8") == f"{size} mb32 graph cudnn t8"


def test_a_name_holds_no_separator_of_paths() -> None:
    """Tune refuses one that does."""
    assert trial_name(load("20m").model.model_dump(mode="json"), "mb8 cache=a/b") == "20m mb8 cache=a-b"
