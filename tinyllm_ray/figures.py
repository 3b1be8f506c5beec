"""Figures that are compared in a line, with as many digits as tell them apart."""

_DIGITS_OF_A_FLOAT = 17


def told_apart(form: str, *values: float) -> tuple[str, ...]:
    """`values` in a format of one digit such as `.2g` or `,.0f`, with more where two that differ would look alike.

    As `.1%`, 0.012 and 0.008 are 1.2% and 0.8%, but 0.0112 and 0.0108 are 1.12% and 1.08%.
    """
    before, digits, kind = form[:-2], int(form[-2]), form[-1]
    for more in range(_DIGITS_OF_A_FLOAT):
        words = tuple(format(value, f"{before}{digits + more}{kind}") for value in values)
        if len(set(words)) >= len(set(values)):
            break
    return words
