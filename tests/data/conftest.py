"""Small caches made by hand, and the default corpus's cache, built once."""

import os
from pathlib import Path

import pytest
from small_caches import MakeCache

import tinyllm_ray
from tinyllm_ray.data.cache import TokenCache, open_cache


@pytest.fixture(scope="session")
def counting_cache(make_cache: MakeCache) -> TokenCache:
    """1,005 training tokens 0, 1, 2, ... in shards of 100, so that a row's first token says which row it is."""
    return make_cache(range(1005))


@pytest.fixture(scope="session")
def built_cache(built_root: Path) -> TokenCache:
    (folder,) = built_root.glob("[!.]*")
    return open_cache(folder)


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """Lets a child process import the package that is tested, installed or not."""
    package = str(Path(tinyllm_ray.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
