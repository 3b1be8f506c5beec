"""The pictures of a run's page."""

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tinyllm_ray.tune.page import text
from tinyllm_ray.tune.page.run_data import CURVES, RunPage
from tinyllm_ray.tune.page.svg import COLOURS, WIDTH, Drawing
from tinyllm_ray.tune.page.text import printable

_LEFT = 52.0
_RIGHT = 14.0


def curve_chart(page: RunPage, name: str) -> Markup | None:
    """One curve over tokens: the mean of each stretch of updates, its range behind; evaluations with the loss."""
    points = page.curves.get(name)
    if not points:
        return None
    drawing = Drawing(f"curve-{name}", 190)
    axes = drawing.axes(_LEFT, 26, WIDTH - _LEFT - _RIGHT, 134)
    axes.grid(visible=True, axis="y")
    tokens = [point.tokens for point in points]
    axes.fill_between(
        tokens, [point.low for point in points], [point.high for point in points], color=COLOURS["idle"], linewidth=0
    )
    (line,) = axes.plot(tokens, [point.mean for point in points], color=COLOURS["other"], linewidth=1.5)
    drawing.title(line, f"{CURVES[name]}: {points[-1].mean:.4g} at the end")
    if name == "loss":
        for index, (split, found) in enumerate(page.evaluations.items()):
            colour = COLOURS[("selected", "baseline")[index % 2]]
            for place, loss in found:
                (mark,) = axes.plot([place], [loss], "o", markersize=5, color=colour)
                drawing.title(mark, f"{split} loss {loss:.4f} after {text.tokens(place)} tokens")
    if name == "tokens_per_second":
        axes.set_ylim(0, max(point.high for point in points) * 1.05)
    axes.set_xlim(0, tokens[-1] * 1.02 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.tokens(value) if value else "0"))
    form = text.rate if name == "tokens_per_second" else lambda value: f"{value:.3g}"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value) if value else "0"))
    axes.tick_params(axis="y", labelcolor=COLOURS["soft"], labelsize=11)
    heading = printable(CURVES[name])
    drawing.figure.text(0.004, 1 - 11 / drawing.height, heading, weight="bold", va="center")
    return drawing.svg(f"{CURVES[name]} over tokens")


def start_chart(page: RunPage) -> Markup | None:
    """The stages up to the first update, each after the other."""
    stages = {name: seconds for name, seconds in page.start_seconds.items() if seconds > 0}
    if not stages:
        return None
    row = 21.0
    drawing = Drawing("start", row * len(stages) + 22)
    left = 138.0
    axes = drawing.axes(left, 0, WIDTH - left - 48, row * len(stages))
    total = sum(stages.values())
    axes.set_xlim(0, total)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks(range(len(stages)), [printable(name.replace("_", " "), 22) for name in stages])
    axes.tick_params(axis="y", labelsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} s" if value else "0"))
    began = 0.0
    for index, (name, seconds) in enumerate(stages.items()):
        bar = axes.barh(index, seconds, 0.7, began, color=COLOURS["selected"])
        drawing.title(bar[0], f"{name}: {text.seconds(seconds)}")
        axes.text(total, index, f"  {text.seconds(seconds)}", va="center", size=11)
        began += seconds
    return drawing.svg("Seconds of each stage from the process's start to the first update's end")
