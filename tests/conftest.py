"""Which tests run (`long`, `slow`, `slurm` with the option of that name, `gpu`, `browser` where there is one), and what
they share."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from browsers import find_chromium
from command_line import TINY_RECIPE, TINY_SPACE, Finished, RunModule
from hypothesis import HealthCheck, settings
from small_caches import MakeCache, write_cache

from tinyllm_ray.data.cache import TokenCache

# Hypothesis fails an example that takes 200 ms, as one that waits for the disk of a busy machine may.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """A shell has its background jobs ignore these two, and what the tests start would inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take 10 seconds or more as well")
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes as well")
    parser.addoption("--slurm", action="store_true", help="run the tests that boot a Slurm of several nodes as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needs_gpu = pytest.mark.skip(reason="needs a CUDA device")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(needs_gpu)
    for marker, why in (("slurm", _no_slurm(config)), ("browser", _no_browser())):
        for item in items if why else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=why))
    for marker, takes in (("long", "10 seconds or more"), ("slow", "minutes")):
        for item in items if not config.getoption(f"--{marker}") else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"takes {takes}; run with --{marker}"))


def _no_slurm(config: pytest.Config) -> str | None:
    if not config.getoption("--slurm"):
        return "boots a Slurm of several nodes on this machine; run with --slurm"
    needed = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "ps")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm slurm-client munge iproute2 procps"
    script = Path(__file__).parents[1] / "cluster" / "local_slurm.sh"
    done = subprocess.run([script, "check"], text=True, capture_output=True, check=False)
    words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"no namespaces for the nodes of a Slurm: {words[-1]}" if done.returncode else None


def _no_browser() -> str | None:
    return None if find_chromium() else "no Chromium: apt-get install chromium"


def _has_gpu() -> bool:
    # Importing torch takes seconds, so only where a collected test asks for it.
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Shapes this small only lose by a second thread, seconds where the cores are busy."""
    torch = sys.modules.get("torch")
    if torch is None:  # not imported for this
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def built_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for $TINYLLM_RAY_CACHE that holds the default corpus's cache."""
    from tinyllm_ray.data.prepare import CACHE_VARIABLE, default_cache

    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(root))
        default_cache(progress=False)
    return root


@pytest.fixture(scope="session")
def run_module(built_root: Path) -> RunModule:
    """run_module("tinyllm_ray.tune", "--budget", "60s", cwd=...) in a process of its own, over the default cache."""

    def run(module: str, *arguments: object, cwd: Path, timeout: float | None = 200) -> Finished:
        # As of now: a Ray started in this process leaves its kind of authentication here for those that join it.
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"TINYLLM_RAY_CACHE": str(built_root), "COLUMNS": "200"}
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, time.monotonic() - begin)

    return run


@pytest.fixture
def neither_torch_nor_ray(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here on fail where they import one of the two, which takes seconds."""
    folder = tmp_path_factory.mktemp("neither")
    for name in ("torch", "ray"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise AssertionError('{name} is imported')")
        (folder / name / "version.py").write_text("cuda = None")  # which is read without an import
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `recipe.yaml` and `space.yaml`."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "recipe.yaml").write_text(TINY_RECIPE)
    (folder / "space.yaml").write_text(TINY_SPACE)
    return folder


@pytest.fixture(scope="session")
def make_cache(tmp_path_factory: pytest.TempPathFactory) -> MakeCache:
    """make_cache(train, shard_tokens=..., vocab_size=..., validation=...) in a folder of its own."""

    def make(
        train: Sequence[int], shard_tokens: int = 100, vocab_size: int = 2**16, validation: Sequence[int] = (1, 2)
    ) -> TokenCache:
        splits = {"train": train, "validation": validation}
        return write_cache(tmp_path_factory.mktemp("cache"), splits, shard_tokens, vocab_size)

    return make
