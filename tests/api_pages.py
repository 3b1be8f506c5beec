"""Renders the public docstrings to pages, the README in front: `python tests/api_pages.py FOLDER`."""

import argparse
from importlib import import_module
from pathlib import Path

import pdoc
import pdoc.render

import tinyllm_ray
import tinyllm_ray.tune

PUBLIC = (
    *("tinyllm_ray.tune", "tinyllm_ray.config", "tinyllm_ray.sections", "tinyllm_ray.execution"),
    *("tinyllm_ray.protocol", "tinyllm_ray.records", "tinyllm_ray.table", "tinyllm_ray.clock", "tinyllm_ray.errors"),
    *("tinyllm_ray.data.prepare", "tinyllm_ray.data.cache", "tinyllm_ray.model.llama"),
    *("tinyllm_ray.train.recipe", "tinyllm_ray.train.trainer"),
    *("tinyllm_ray.cluster.connect", "tinyllm_ray.cluster.site"),
)
"""Modules whose names are for users; everything else may change from one version to the next."""


def write_pages(folder: Path) -> None:
    """A page a module, plain files that need no server; what was there is written over."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    modules = "".join(map(_entry, PUBLIC))
    tinyllm_ray.__doc__ = readme.removeprefix("# tinyllm_ray\n") + "\n## Public modules\n\n" + modules
    for name in tinyllm_ray.tune.__all__:  # which come when they are asked for; pdoc takes what is there
        setattr(tinyllm_ray.tune, name, getattr(tinyllm_ray.tune, name))
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"tinyllm_ray {tinyllm_ray.__version__}")
    # A package brings all modules below it; those that are public come back by their own names.
    pdoc.pdoc("tinyllm_ray", r"!tinyllm_ray\.", *PUBLIC, r"!tinyllm_ray\.tune\.", output_directory=folder)


def _entry(module: str) -> str:
    """A line of the front page: the module's page, and what it owns."""
    first_line = (import_module(module).__doc__ or "").partition("\n")[0]
    return f"- [{module}]({module.replace('.', '/')}.html): {first_line}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pages go")
    folder = parser.parse_args().folder
    write_pages(folder)
    print(folder / "index.html")
