"""A matplotlib figure as SVG that lies inside a page: its text stays text, its colours are the page's own.

Every colour drawn is a placeholder that becomes a CSS variable, so that light and dark need one drawing. Marks get
hover titles (SVG's <title>, which needs no script), and identifiers a prefix that keeps figures on one page apart.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tinyllm_ray.tune.page.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH: Final = 360.0
"""Of a figure, in units that are CSS pixels on a phone of 390."""

_NAMES: Final = (
    "ink",
    "soft",
    "line",
    "paper",
    "selected",
    "baseline",
    "other",
    "process",
    "start",
    "compile",
    "warmup",
    "windows",
    "proof",
    "idle",
)
COLOURS: Final = {name: f"#{index + 1:02x}f00{index:x}" for index, name in enumerate(_NAMES)}
"""What to draw with; the page's style sheet defines --ink and so on."""

_VARIABLES: Final = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "page",
    "text.parse_math": False,  # a label is no formula, whatever it holds
    "font.size": 12,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.linewidth": 0.8,
    "xtick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.color": COLOURS["line"],
    "ytick.labelcolor": COLOURS["ink"],
    "xtick.labelsize": 11,
    "ytick.labelsize": 12,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
}


class Drawing:
    """One figure while it is drawn; sizes are in the units of WIDTH."""

    def __init__(self, name: str, height: float) -> None:
        self.height = height
        self._name = name
        self._titles: dict[str, str] = {}
        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        FigureCanvasSVG(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        """Axes at a place counted from the upper left, without frame, with a grid across the values."""
        box = (left / WIDTH, 1 - (top + height) / self.height, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(box)
        axes.patch.set_visible(False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(visible=True, axis="x")
        axes.set_axisbelow(True)
        return axes

    def title(self, artist: Any, text: str) -> None:
        """What hovering over a mark says."""
        identifier = f"mark-{len(self._titles)}"
        artist.set_gid(identifier)
        self._titles[identifier] = printable(text)

    def svg(self, description: str) -> Markup:
        """The figure as an element to put into a page."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a glyph that the measuring font lacks: the browser has its own
            self.figure.patch.set_visible(False)
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        # Matplotlib wrote it a moment ago, from text that `printable` has seen: no entities, nothing to expand.
        root = ElementTree.fromstring(buffer.getvalue())
        _strip(root)
        self._add_titles(root)
        _isolate(root, self._name)
        root.attrib = {
            "viewBox": root.attrib["viewBox"],
            "role": "img",
            "aria-label": printable(description, 1000),
            "class": "chart",
        }
        return Markup(ElementTree.tostring(root, encoding="unicode"))

    def _add_titles(self, root: ElementTree.Element) -> None:
        for group in root.iter("g"):
            text = self._titles.get(group.attrib.get("id", ""))
            if text is not None:
                title = ElementTree.Element("title")
                title.text = text
                group.insert(0, title)


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Within it figures look like the page's, whatever the user's own matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(_SETTINGS)
        yield


def _strip(root: ElementTree.Element) -> None:
    """Without namespaces, metadata, matplotlib's style sheet (which would hold for the whole page), colours, fonts."""
    for parent in list(root.iter()):
        parent.tag = parent.tag.rpartition("}")[2]
        parent.attrib = {name.rpartition("}")[2]: value for name, value in parent.attrib.items()}
        if "style" in parent.attrib:
            style = re.sub("#[0-9a-f]{6}", lambda found: _VARIABLES.get(found[0], found[0]), parent.attrib["style"])
            parent.attrib["style"] = _without_family(style)
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)


def _without_family(style: str) -> str:
    """Size and weight of a text stay, as measured; the family is the page's. Matplotlib up to 3.9 writes all in one."""
    style = re.sub(r"font-family: [^;]*;? ?", "", style)
    style = re.sub(r"font: (\d+) (\d[\d.]*px) [^;]*", r"font-weight: \1; font-size: \2", style)
    return re.sub(r"font: (\d[\d.]*px) [^;]*", r"font-size: \1", style)


def _isolate(root: ElementTree.Element, name: str) -> None:
    """Identifiers that something refers to get `name` before them; the others go."""
    text = " ".join(value for element in root.iter() for value in element.attrib.values())
    used = set(re.findall(r"#([\w-]+)", text))
    for element in root.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
        for attribute, value in element.attrib.items():
            if attribute == "id":
                element.attrib[attribute] = f"{name}-{value}"
            elif attribute == "href" or "url(#" in value:
                element.attrib[attribute] = re.sub(r"#([\w-]+)", rf"#{name}-\1", value)
