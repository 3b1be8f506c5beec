"""Quantiles of Student's t against published tables and its closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.measure.student import t_probability, t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    # NIST/SEMATECH e-Handbook, 1.3.6.7.2, to three digits
    [
        (0.90, 3, 1.638),
        (0.95, 1, 6.314),
        (0.95, 10, 1.812),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.975, 30, 2.042),
        (0.99, 8, 2.896),
        (0.999, 4, 7.173),
    ],
)
def test_the_tables_of_statistics_books(probability: float, degrees: float, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, abs=6e-4)
    assert t_quantile(1 - probability, degrees) == -t_quantile(probability, degrees)


@given(st.floats(0.501, 0.9999))
def test_one_and_two_degrees_of_freedom_have_a_closed_form(probability: float) -> None:
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-8)
    share = 2 * probability - 1
    assert t_quantile(probability, 2) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-8)


@given(st.floats(0.01, 0.99), st.floats(0.5, 500))
def test_the_quantile_is_the_inverse_of_the_probability(probability: float, degrees: float) -> None:
    assert t_probability(t_quantile(probability, degrees), degrees) == pytest.approx(probability, abs=1e-8)


def test_many_degrees_of_freedom_are_the_normal_distribution() -> None:
    assert t_quantile(0.975, 1e7) == pytest.approx(1.959964, abs=1e-5)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0.0), (math.nan, 3), (0.9, -1)])
def test_what_has_no_quantile_is_refused(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, degrees)
