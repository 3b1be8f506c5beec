"""Figures and foreign text as people read them."""

import math
import unicodedata
from typing import Final

TIMES: Final = "\N{MULTIPLICATION SIGN}"


def rate(value: float | None) -> str:
    """A throughput: 1.89 M, 812 k, 4,424."""
    if value is None or not math.isfinite(value):
        return "—"
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e5, " k")):
        if value >= limit * 0.9995:
            scaled = value / limit if limit != 1e5 else value / 1e3
            return f"{_figure(scaled)}{unit}"
    return _figure(value)


def _figure(value: float) -> str:
    """Three digits that count, and never a power of ten: 9.87, 98.7, 987, 9,870."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def tokens(value: float) -> str:
    """A number of tokens: 10 M, 1.4 B, 20 T."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit * 0.9995:
            return f"{_figure(value / limit)} {unit}"
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A duration with two or three digits that count: 0.42 s, 31 s, 4.5 min, 2.1 h, 3.4 days."""
    if value is None or not math.isfinite(value):
        return "—"
    for limit, divisor, unit in ((172800, 86400, "days"), (5400, 3600, "h"), (120, 60, "min")):
        if value >= limit:
            return f"{_figure(value / divisor)} {unit}"
    if value >= 9.95:
        return f"{value:.0f} s"
    return f"{value:.2g} s" if value >= 0.01 or not value else "<0.01 s"


def ratio(value: float | None, digits: int = 2) -> str:
    """How many times, like 1.34 and the sign."""
    return "—" if value is None or not math.isfinite(value) else f"{value:.{digits}f}{TIMES}"


def gibibytes(value: float | None) -> str:
    """Bytes as GiB."""
    return "—" if value is None else f"{value / 2**30:.3g} GiB"


def percent(value: float | None) -> str:
    """A share."""
    return "—" if value is None else f"{value:.1%}"


def printable(text: str, most: int = 200) -> str:
    """`text` on one line, in characters that XML and UTF-8 can hold, cut to `most` of them."""
    kept = "".join("�" if unicodedata.category(one) in ("Cc", "Cs", "Cn", "Co") else one for one in text)
    return kept if len(kept) <= most else kept[: most - 1] + "…"
