"""The pictures of a study's page."""

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tinyllm_ray.search.device_blocks import DeviceSpeed
from tinyllm_ray.tune.page import text
from tinyllm_ray.tune.page.findings import Factor, Pair, Point
from tinyllm_ray.tune.page.spending import Spending
from tinyllm_ray.tune.page.study import StudyPage
from tinyllm_ray.tune.page.svg import COLOURS, WIDTH, Drawing
from tinyllm_ray.tune.page.text import printable

_ROW = 20.0
_LABELS = 118.0
_RIGHT = 48.0
_AXIS = 22.0
_LABEL_LETTERS = 19
"""Of a label in _LABELS; the whole of it is in the mark's title."""


def factor_chart(page: StudyPage) -> Markup | None:
    """Throughput under each value of each factor, on one scale that starts at 0."""
    rates = [point.targets_per_second for factor in page.factors for _, points, _ in factor.values for point in points]
    if not rates:
        return None
    heights = [26 + _ROW * len(factor.values) for factor in page.factors]
    drawing = Drawing("factors", sum(heights) + _AXIS)
    top = 0.0
    for factor, height in zip(page.factors, heights, strict=True):
        axes = drawing.axes(_LABELS, top + 22, WIDTH - _LABELS - _RIGHT, height - 26)
        axes.set_xlim(0, max(rates) * 1.04)
        last = factor is page.factors[-1]
        _value_axis(axes, text.rate, labels=last)
        _factor_panel(drawing, axes, factor, page)
        heading = printable(factor.name.replace("_", " "), 50)
        drawing.figure.text(0.004, 1 - (top + 13) / drawing.height, heading, weight="bold", va="center")
        top += height
    return drawing.svg("Throughput in targets a second under each value of each factor")


def _factor_panel(drawing: Drawing, axes: Axes, factor: Factor, page: StudyPage) -> None:
    _rows(axes, [value for value, _, _ in factor.values])
    for row, (value, points, fates) in enumerate(factor.values):
        if not points:
            axes.text(0, row, f" {printable(fates, 34)}", color=COLOURS["soft"], va="center", size=11)
            continue
        best = points[0].targets_per_second
        axes.plot([0, best], [row, row], color=COLOURS["line"], linewidth=2, solid_capstyle="butt")
        for point in reversed(points):
            name = f"{factor.name} {value}: {page.labels[point.candidate]}, {text.rate(point.targets_per_second)}"
            _mark(drawing, axes, point, row, page, name)
        axes.text(axes.get_xlim()[1], row, f"  {text.rate(best)}", va="center", color=COLOURS["ink"], size=11)


def _mark(drawing: Drawing, axes: Axes, point: Point, y: float, page: StudyPage, title: str) -> None:
    """The selected one filled, the baseline a ring, the others small."""
    role = next((role for role in ("selected", "baseline") if page.roles.get(role) == point.candidate), "other")
    face = COLOURS["paper"] if role == "baseline" else COLOURS[role]
    size = 4.5 if role == "other" else 7.5
    mark = Line2D(
        [point.targets_per_second],
        [y],
        linestyle="",
        marker="o",
        markersize=size,
        markerfacecolor=face,
        markeredgecolor=COLOURS[role],
        markeredgewidth=2 if role == "baseline" else 0,
        zorder={"other": 3, "baseline": 4, "selected": 5}[role],
    )
    axes.add_artist(mark).set_clip_on(False)
    drawing.title(mark, f"{title} targets/s" + ("" if role == "other" else f" ({role})"))


def time_line(spent: Spending, labels: Mapping[str, str]) -> Markup | None:
    """The budget from left to right, a lane a device, each stage of each trial in its colour."""
    if not spent.slices:
        return None
    lanes = list(spent.sums)
    end = max(spent.budget_seconds or 0.0, spent.elapsed_seconds, *(one.began + one.seconds for one in spent.slices))
    drawing = Drawing("time", 44 * len(lanes) + _AXIS)
    for index, device in enumerate(lanes):
        axes = drawing.axes(8, 44 * index + 20, WIDTH - 24, 20)
        axes.set_xlim(0, end)
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        _time_axis(axes, end, labels=device == lanes[-1])
        idle = axes.barh(0.5, spent.elapsed_seconds, 0.9, color=COLOURS["idle"])
        drawing.title(idle[0], "no trial")
        for one in spent.slices:
            if one.device == device:
                # An artist alone: `barh` looks for limits anew for each of a thousand bars.
                bar = axes.add_artist(
                    Rectangle((one.began, 0.05), one.seconds, 0.9, color=COLOURS[one.stage], linewidth=0)
                )
                candidate = labels.get(one.candidate, one.candidate)
                drawing.title(bar, f"{candidate}: {one.stage}, {text.seconds(one.seconds)}")
        heading = printable(device, 52)
        drawing.figure.text(8 / WIDTH, 1 - (44 * index + 12) / drawing.height, heading, size=11, color=COLOURS["soft"])
    return drawing.svg("What the budget's seconds went to, by device")


def kernel_chart(pairs: Sequence[Pair]) -> Markup | None:
    """Milliseconds an update by category of kernels, baseline beside selected."""
    values = [value for pair in pairs for value in (pair.baseline, pair.selected) if value]
    if not values:
        return None
    row = 30.0
    drawing = Drawing("kernels", row * len(pairs) + _AXIS + 4)
    axes = drawing.axes(_LABELS, 4, WIDTH - _LABELS - _RIGHT, row * len(pairs))
    axes.set_xlim(0, max(values))
    _rows(axes, [pair.name.replace("_", " ") for pair in pairs])
    _value_axis(axes, lambda value: f"{value:.3g} ms")
    for index, pair in enumerate(pairs):
        for role, offset, value in (("baseline", -0.2, pair.baseline), ("selected", 0.2, pair.selected)):
            if value is None:
                continue
            bar = axes.barh(index + offset, value, 0.36, color=COLOURS[role])
            drawing.title(bar[0], f"{pair.name}, {role}: {value:.3g} ms an update")
            axes.text(value, index + offset, f" {value:.3g}", va="center", size=10)
    return drawing.svg("Kernel time an update by category, baseline and selected")


def memory_chart(page: StudyPage) -> Markup | None:
    """Throughput over peak memory, a mark a candidate."""
    if len(page.memory) < 2:
        return None
    drawing = Drawing("memory", 210)
    axes = drawing.axes(50, 24, WIDTH - 74, 142)
    axes.grid(visible=True, axis="y")
    axes.set_ylim(0, max(point.targets_per_second for point, _ in page.memory) * 1.08)
    axes.set_xlim(0, max(size for _, size in page.memory) / 2**30 * 1.06)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.rate(value) if value else "0"))
    axes.tick_params(axis="y", labelcolor=COLOURS["soft"], labelsize=11)
    _value_axis(axes, lambda value: f"{value:.3g} GiB")
    for point, size in page.memory:
        title = f"{page.labels[point.candidate]}: {text.gibibytes(size)}, {text.rate(point.targets_per_second)}"
        place = Point(point.candidate, size / 2**30)
        _mark(drawing, axes, place, point.targets_per_second, page, title)
    drawing.figure.text(0.01, 1 - 10 / drawing.height, "targets/s", color=COLOURS["soft"], size=11, va="center")
    axes.set_xlabel("peak memory", size=11)
    return drawing.svg("Throughput and peak memory of each candidate")


def device_chart(devices: Sequence[DeviceSpeed]) -> Markup | None:
    """Each device's speed relative to the fastest, with its 95% interval."""
    if not devices:
        return None
    drawing = Drawing("devices", 38.0 * len(devices) + _AXIS)
    axes = drawing.axes(14, 0, WIDTH - 14 - 64, 38.0 * len(devices))
    low, high = min(one.low for one in devices), max(one.high for one in devices)
    margin = max(0.005, (high - low) * 0.1)
    axes.set_xlim(low - margin, high + margin)
    _rows(axes, [""] * len(devices))
    _value_axis(axes, lambda value: f"{value:.1%}")
    for row, one in enumerate(devices):
        colour = COLOURS["baseline" if one.slow else "selected"]
        axes.plot([one.low, one.high], [row + 0.2] * 2, color=colour, linewidth=2)
        (mark,) = axes.plot([one.ratio], [row + 0.2], "o", markersize=7, color=colour)
        drawing.title(mark, f"{one.device}: {one.ratio:.2%} ({one.low:.2%} to {one.high:.2%})")
        axes.text(low - margin, row - 0.25, printable(one.device, 44), va="center", size=11)
        axes.text(high + margin, row + 0.2, f" {one.ratio:.1%}{' slow' if one.slow else ''}", va="center", size=11)
    return drawing.svg("Speed of each device relative to the fastest")


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    """One row a label, the first on top."""
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), [printable(label, _LABEL_LETTERS) for label in labels])
    # As wide as the labels' place in the widest of usual fonts.
    axes.tick_params(axis="y", labelsize=11 if max(map(len, labels), default=0) > 14 else 12)


def _value_axis(axes: Axes, form: Callable[[float], str], labels: bool = True) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value) if value else "0"))
    axes.tick_params(axis="x", labelbottom=labels)


_STEPS = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
"""Seconds between a time axis's ticks, of which four go into its width."""


def _time_axis(axes: Axes, end: float, labels: bool) -> None:
    step = next((step for step in _STEPS if end / step <= 4.5), end / 4)
    unit, divisor = ("h", 3600) if step >= 1800 else ("min", 60) if step >= 60 else ("s", 1)
    ticks = [step * index for index in range(int(end / step) + 1)]
    axes.set_xticks(ticks, [f"{tick / divisor:.3g} {unit}" if tick else "0" for tick in ticks])
    axes.tick_params(axis="x", labelbottom=labels)
