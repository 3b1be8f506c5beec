"""Quantiles of Student's t distribution, for intervals from a few measurements: no dependency has them.

The distribution function is the regularised incomplete beta function by its continued fraction (Abramowitz and Stegun
26.5.8 and 26.7.1; evaluated as in Press et al., Numerical Recipes, 6.4), inverted by bisection.
"""

import functools
import math

_TINY = 1e-300


@functools.cache
def t_quantile(probability: float, degrees: float) -> float:
    """The value that a t-distributed one with so many degrees of freedom (fractions allowed) stays below.

    To 1e-9 relative. Raises ValueError where `probability` is not inside 0 to 1 or `degrees` is not positive.
    """
    if not 0 < probability < 1 or not degrees > 0:
        raise ValueError(f"no quantile of t at probability {probability} with {degrees} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_probability(value: float, degrees: float) -> float:
    """The probability that a t-distributed variable stays below `value`."""
    tail = _incomplete_beta(degrees / (degrees + value * value), degrees / 2, 0.5) / 2
    return 1 - tail if value > 0 else tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for x in 0 to 1."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges quickly on one side of the mean only; the other is its mirror image.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 400):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
