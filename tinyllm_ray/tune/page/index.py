"""The page that lists studies which share one budget: `OUT/index.html`, made of their summaries alone."""

from pathlib import Path

from tinyllm_ray import journal
from tinyllm_ray.tune.page import text
from tinyllm_ray.tune.page.template import render
from tinyllm_ray.tune.several_folder import INDEX, read_whole


def write_index(out: Path) -> Path:
    """Make OUT/index.html again; returns its path. Raises ConfigError where OUT holds no such studies, OSError."""
    path = out / INDEX
    journal.write_atomically(path, _page(out).encode(errors="replace"))
    return path


def _page(out: Path) -> str:
    summary = read_whole(out)
    studies = summary.get("studies", [])
    heading = f"Studies: {', '.join(text.printable(one['name'], 40) for one in studies)}"
    return render("index.html", heading=heading, summary=summary, studies=studies, refresh=summary.get("ended") is None)
