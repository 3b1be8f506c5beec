"""Fills in the pages' templates."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tinyllm_ray.tune.page import text

_FILTERS = ("rate", "tokens", "seconds", "ratio", "gibibytes", "percent", "printable")
"""Functions of `text` that templates may use."""


def render(template: str, **values: Any) -> str:
    """A template filled in; everything that is not marked as safe is escaped."""
    # What is misspelled raises here, in a test, and is not silently left out of the page.
    environment = Environment(
        loader=PackageLoader("tinyllm_ray.tune.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in _FILTERS}
    return environment.get_template(template).render({"refresh": False, **values})
