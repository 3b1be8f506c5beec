"""What a training imports before its first update: torch, and little beside it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tinyllm_ray.train.__main__ as command_line
from tinyllm_ray.data.cache import TokenCache

HEAVY = (
    "ray",
    "pandas",
    "transformers",
    "datasets",
    "tokenizers",
    "pyarrow",
    "matplotlib",
    "tensorboard",
    "tensorboardX",
    "scipy",
    "sklearn",
    "torchvision",
)
"""Libraries that take a good part of a second, or more, and that no update needs."""


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.strip()


def imports_of_a_start() -> list[str]:
    """The modules of the package that the training's command line names, at its top and inside its functions."""
    tree = ast.parse(Path(command_line.__file__).read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return sorted(name for name in found if name.startswith("tinyllm_ray."))


def test_a_training_imports_nothing_heavier_than_torch(tmp_path: Path, tiny_cache: TokenCache) -> None:
    """Neither a whole short one, nor those that need what it did not."""
    model = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "context": 8, "vocab_size": 61}
    settings = [
        *(f"model.{key}={value}" for key, value in model.items()),
        "training.tokens_per_update=16",
        "training.max_updates=1",
        "execution.cpu_threads=1",
        f"data.cache={tiny_cache.folder}",
    ]
    arguments = ["--config", "nano", "--out", str(tmp_path / "run"), *(f"--set={setting}" for setting in settings)]
    names = imports_of_a_start()
    assert {"tinyllm_ray.train.run", "tinyllm_ray.train.show", "tinyllm_ray.data.prepare"} <= set(names)
    loaded = f"print([name for name in {HEAVY!r} if name in sys.modules])"
    code = f"import sys\nfrom tinyllm_ray.train.__main__ import main\nprint(main({arguments!r}))\n{loaded}\n"
    code += f"import {', '.join(names)}\n{loaded}"
    assert run_python(code).splitlines()[-3:] == ["0", "[]", "[]"]


@pytest.mark.parametrize("module", ["tinyllm_ray.train.compile_cache", "tinyllm_ray.command", "tinyllm_ray.errors"])
def test_what_comes_before_torch_is_the_standard_library(module: str) -> None:
    code = (
        f"import sys, {module}\nprint([name for name in ('torch', 'numpy', 'pydantic', 'yaml') if name in sys.modules])"
    )
    assert run_python(code) == "[]"
