"""Where compiled things are kept: bytecode only where torch came without it, and never somebody else's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE, bytecode_variables, cache_variables, compile_cache_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "caches"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return tmp_path / "caches"


def install_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, bytecode: bool) -> None:
    """A torch of one empty module, first on the path."""
    package = folder / "torch"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if bytecode:
        (package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc").write_bytes(b"")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_a_torch_with_bytecode_is_left_as_it_is(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, monkeypatch, bytecode=True)
    assert bytecode_variables() == {}
    flash4 = {f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")}
    assert set(cache_variables("F")) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} | flash4


def test_a_torch_without_bytecode_gets_a_folder_for_it(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torch(tmp_path, monkeypatch, bytecode=False)
    wanted = {"PYTHONPYCACHEPREFIX": str(caches / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    assert bytecode_variables() == wanted
    assert wanted.items() <= cache_variables("F").items()


def test_a_users_own_prefix_stays(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, monkeypatch, bytecode=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/elsewhere")
    assert bytecode_variables() == {}


def test_the_second_process_reads_the_bytecode_that_the_first_and_its_child_wrote(tmp_path: Path) -> None:
    """Also where the environment forbids bytecode, as container images do."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "slow.py").write_text("")
    (tmp_path / "childs.py").write_text("")
    code = (
        "import subprocess, sys\nfrom tinyllm_ray.train.compile_cache import keep_bytecode\nkeep_bytecode()\n"
        "import slow\nsubprocess.run([sys.executable, '-c', 'import childs'], check=True)\nprint(slow.__cached__)"
    )
    environment = os.environ | {
        FOLDER_VARIABLE: str(tmp_path / "caches"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }
    environment.pop("PYTHONPYCACHEPREFIX", None)

    def written() -> dict[str, int]:
        return {path.name.split(".")[0]: path.stat().st_mtime_ns for path in (tmp_path / "caches").rglob("*.pyc")}

    def cached() -> str:
        run = [sys.executable, "-c", code]
        return subprocess.run(run, env=environment, capture_output=True, check=True, text=True).stdout.strip()

    assert cached().startswith(str(tmp_path / "caches" / "bytecode"))
    first = written()
    assert {"slow", "childs"} <= set(first)
    assert cached().startswith(str(tmp_path / "caches" / "bytecode"))
    assert written() == first
    assert not list(tmp_path.glob("__pycache__"))


def test_somebody_elses_folder_is_refused(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        compile_cache_folder()


def test_a_folder_that_cannot_be_made_is_a_users_mistake(caches: Path) -> None:
    caches.write_text("a file")
    with pytest.raises(ConfigError, match=f"set {FOLDER_VARIABLE} to a local folder of yours"):
        compile_cache_folder()
