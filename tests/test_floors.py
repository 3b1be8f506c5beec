"""Imports go down only, by folder; Ray, torch and the clock stay where they belong.

The floors are 0 the root's modules, 1 model, data and measure, 2 train and search, 3 cluster, 4 tune. Imports inside
functions count like those at the top; those under `if TYPE_CHECKING` too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tinyllm_ray

PACKAGE = Path(tinyllm_ray.__file__).parent
FLOORS = {"": 0, "model": 1, "data": 1, "measure": 1, "train": 2, "search": 2, "cluster": 3, "tune": 4}
STANDARD_LIBRARY_ONLY = (
    "errors",
    "clock",
    "journal",
    "allocation",
    "paths",
    "summary",
    "tune.budget",
    "tune.going_on",
    "tune.supervisor",
    "tune.channel",
    "tune.child",
    "tune.mirror",
    "tune.sessions",
    "tune.preset_names",
    "tune.processes",
    "tune.terminal",
)
"""What the supervisor runs on: its clock starts before anything slow is imported."""


@dataclass(frozen=True)
class Import:
    """One import statement, or one name of it."""

    module: str
    """Who imports, without the package's name: `train.trainer`, `` for the package itself."""
    line: int
    target: str
    """What is imported: a module of the package without the package's name, else the whole dotted name."""
    own: bool
    """Whether the target is in the package."""
    top: bool
    """Whether it happens when the module is imported."""


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    known = modules(package)
    return [found for module, path in known.items() for found in _imports_of(module, path, known, package.name)]


def _imports_of(module: str, path: Path, known: dict[str, Path], package: str) -> Iterator[Import]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inside = {id(node) for scope in nodes if isinstance(scope, FUNCTIONS) for node in ast.walk(scope)}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in {"__import__", "import_module"}:
            # A name put together at run time cannot be checked; one in plain sight can.
            names = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
        else:
            continue
        for name in names:
            own = name == package or name.startswith(f"{package}.")
            target = _module(name.removeprefix(package).lstrip("."), known) if own else name
            yield Import(module, node.lineno, target, own, top=id(node) not in inside)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _module(dotted: str, known: dict[str, Path]) -> str:
    """The longest beginning of `dotted` that is a module; the rest are names inside it."""
    while dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted


def folder(module: str, known: dict[str, Path]) -> str:
    return module.partition(".")[0] if "." in module or known[module].name == "__init__.py" else ""


def violations(package: Path) -> list[str]:
    """Every import that breaks a rule, as `module:line: why`."""
    known, found = modules(package), imports(package)
    broken = [
        f"{one.module or package.name}:{one.line}: {why}"
        for one in found
        for why in (_upward(one, known) if one.own else _misplaced(one, known))
    ]
    return broken + [f"import cycle: {' -> '.join(cycle)}" for cycle in _cycles(known, found)]


def _upward(one: Import, known: dict[str, Path]) -> Iterator[str]:
    here, there = folder(one.module, known), folder(one.target, known)
    if one.module.rpartition(".")[2] == "__main__":
        here = "tune"  # a program stands on the top floor, wherever its file lies
    if one.target.rpartition(".")[2] == "__main__":
        yield f"imports {one.target}, a program"
    if one.module in STANDARD_LIBRARY_ONLY and one.target not in ("", "tune", *STANDARD_LIBRARY_ONLY):
        yield f"imports {one.target}, which needs more than the standard library"
    if here == there:
        return
    if here not in FLOORS or there not in FLOORS:
        yield f"{here if here not in FLOORS else there} is on no floor"
    elif FLOORS[here] < FLOORS[there]:
        yield f"imports {one.target}, which is above it"
    elif FLOORS[here] == FLOORS[there]:
        yield f"imports {one.target}, which is beside it"


def _misplaced(one: Import, known: dict[str, Path]) -> Iterator[str]:
    here, top = folder(one.module, known), one.target.partition(".")[0]
    if top == "ray" and here != "cluster":
        yield "imports ray outside cluster/"
    if here == "search" and top in ("torch", "time"):
        yield f"search/ imports {top}"
    bare = one.module in STANDARD_LIBRARY_ONLY or (one.module in ("", "tune") and one.top)
    if bare and top not in sys.stdlib_module_names:
        yield f"imports {top}, which is not in the standard library"


def _cycles(known: Iterable[str], found: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that need each other at import; a package's own module counts as imported by those in it."""
    edges: dict[str, set[str]] = {module: set() for module in known}
    for one in found:
        if one.own and one.top and one.target != one.module:
            edges[one.module].add(one.target)
    cycles = []
    for start in known:
        path = _way_back(start, edges)
        if path and start == min(path):
            cycles.append([*path, start])
    return cycles


def _way_back(start: str, edges: dict[str, set[str]]) -> list[str] | None:
    paths = [[start]]
    seen = set()
    while paths:
        path = paths.pop()
        for target in sorted(edges[path[-1]]):
            if target == start:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def test_the_package_keeps_its_floors() -> None:
    assert violations(PACKAGE) == []


def test_every_folder_has_a_floor_and_every_bare_module_exists() -> None:
    known = modules(PACKAGE)
    assert {folder(module, known) for module in known} == set(FLOORS)
    assert set(STANDARD_LIBRARY_ONLY) <= set(known)


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """The same by trying: no site-packages, so that anything else fails."""
    code = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); import tinyllm_ray.tune.supervisor"
    # -I -S: no environment, no site-packages.
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_pytorch_is_the_candidates_alone() -> None:
    """A study's process, and the one in which a trial holds its place, take neither its seconds nor its memory."""
    at_once = [one for one in imports(PACKAGE) if one.top]
    reached = {"tune.several", "tune.again.rerun", "tune.again.validate", "cluster.trials", "cluster.prefetch"}
    while more := {one.target for one in at_once if one.own and one.module in reached} - reached:
        reached |= more
    assert "tune.study_run" in reached
    assert [one for one in at_once if one.module in reached and one.target.partition(".")[0] == "torch"] == []


PLANTED = {
    "the root imports a floor": ("config.py", "import planted.model.llama", "imports model.llama, which is above it"),
    "model imports train": (
        "model/llama.py",
        "from planted.train import trainer",
        "imports train.trainer, which is above",
    ),
    "inside a function": (
        "model/llama.py",
        "def f():\n    import planted.tune.report",
        "imports tune.report, which is above",
    ),
    "a type's import": (
        "data/loader.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.tune.report import X",
        "imports tune.report, which is above it",
    ),
    "sideways": (
        "train/trainer.py",
        "from planted.search.study import Study",
        "imports search.study, which is beside it",
    ),
    "sideways by name": (
        "data/loader.py",
        "import importlib\nimportlib.import_module('planted.model')",
        "imports model, ",
    ),
    "a program": ("tune/report.py", "from planted.train.__main__ import main", "imports train.__main__, a program"),
    "its own program": ("train/trainer.py", "from planted.train import __main__", "imports train.__main__, a program"),
    "ray in train": ("train/trainer.py", "from ray import tune", "imports ray outside cluster/"),
    "ray in a function": ("tune/report.py", "async def f():\n    import ray.tune", "imports ray outside cluster/"),
    "torch in search": ("search/study.py", "import torch.nn", "search/ imports torch"),
    "time in search": ("search/study.py", "def f():\n    from time import monotonic", "search/ imports time"),
    "pydantic in the clock": ("clock.py", "import pydantic", "imports pydantic, which is not in the standard library"),
    "yaml, late": (
        "tune/supervisor.py",
        "def f():\n    import yaml",
        "imports yaml, which is not in the standard library",
    ),
    "config in the supervisor": (
        "tune/supervisor.py",
        "from planted import config",
        "needs more than the standard library",
    ),
    "rich in the public names": (
        "tune/__init__.py",
        "import rich",
        "imports rich, which is not in the standard library",
    ),
    "a folder on no floor": ("utils/strings.py", "import planted.config", "utils is on no floor"),
    "a cycle": ("train/trainer.py", "import planted.train.update", "import cycle: train.trainer -> train.update -> "),
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A small package that keeps all the rules."""
    package = tmp_path / "planted"
    for name, text in {
        "__init__.py": "__version__ = '1'",
        "config.py": "import pydantic\nfrom planted.errors import ConfigError",
        "errors.py": "import os.path",
        "clock.py": "import time\nfrom planted.errors import ConfigError",
        "model/__init__.py": "",
        "model/llama.py": "import torch\nfrom planted.config import Config\nfrom planted import __version__",
        "data/__init__.py": "",
        "data/loader.py": "import numpy",
        "train/__init__.py": "",
        "train/trainer.py": "import time\nfrom planted.model.llama import Llama",
        "train/update.py": "from planted.train import trainer",
        "train/__main__.py": "from planted.train import trainer",
        "search/__init__.py": "",
        "search/study.py": "import timeit",
        "cluster/__init__.py": "",
        "cluster/trials.py": "import ray\nfrom planted.search.study import Study\nfrom planted.train import trainer",
        "tune/__init__.py": "def __getattr__(name):\n    from planted.tune import report",
        "tune/report.py": "import rich\nfrom planted.cluster.trials import run",
        "tune/supervisor.py": "import json\nfrom planted.clock import Deadline",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text + "\n")
    return package


def test_the_checker_finds_no_fault_in_a_package_without_one(planted: Path) -> None:
    assert violations(planted) == []
    assert len(imports(planted)) == 22


@pytest.mark.parametrize(("file", "text", "why"), PLANTED.values(), ids=PLANTED)
def test_the_checker_finds_a_planted_fault(planted: Path, file: str, text: str, why: str) -> None:
    path = planted / file
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}{text}\n")
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = violations(planted)
    assert any(why in line for line in found)
    assert all(line.startswith((f"{module}:", "import cycle: ")) for line in found)
