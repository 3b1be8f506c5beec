"""Figures beside each other look different where they are."""

import math

import pytest

from tinyllm_ray.figures import told_apart


@pytest.mark.parametrize(
    ("form", "values", "shown"),
    [
        (".2g", (0.02, 0.01), ("0.02", "0.01")),
        (".2g", (0.0010004, 0.001), ("0.0010004", "0.001")),
        (",.0f", (12_345.4, 12_345.3), ("12,345.4", "12,345.3")),
        (".1%", (0.0112, 0.0108), ("1.12%", "1.08%")),
        (".6g", (3.1, 3.1234561, 3.1234562), ("3.1", "3.1234561", "3.1234562")),
        (".0f", (20.0, 20.0), ("20", "20")),
        (".2g", (math.nan, 0.01), ("nan", "0.01")),
        (".1f", (1.0, math.nextafter(1.0, 2)), ("1.0000000000000002", "1.0000000000000000")[::-1]),
    ],
)
def test_digits_are_added_until_all_that_differ_look_it(
    form: str, values: tuple[float, ...], shown: tuple[str, ...]
) -> None:
    assert told_apart(form, *values) == shown
