"""A node's own copy of a token cache is used where it is whole, and the shared one else."""

import os
import shutil
from pathlib import Path

import pytest
from small_caches import MakeCache

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.staged import VARIABLE, staged_copy


@pytest.fixture
def shared(make_cache: MakeCache) -> TokenCache:
    return make_cache([1, 2, 3, 4] * 20)


def copy_of(cache: TokenCache, root: Path, identity: str | None = None) -> Path:
    return Path(shutil.copytree(cache.folder, root / (identity or cache.identity)))


def test_the_copy_of_the_same_cache_is_used(
    shared: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(shared, tmp_path)
    assert staged_copy(shared) is shared, "nothing is staged"
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = staged_copy(shared)
    assert (found.folder, found.identity) == (copy, shared.identity)
    assert found.read("train", 0, 8).tolist() == shared.read("train", 0, 8).tolist()


def test_a_copy_that_is_missing_cut_or_of_another_cache_is_not(
    shared: TokenCache, make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert staged_copy(shared) is shared
    other = copy_of(make_cache([9] * 80), tmp_path, shared.identity)
    assert staged_copy(shared) is shared
    shutil.rmtree(other)
    shard = next(copy_of(shared, tmp_path).glob("*.bin"))
    os.truncate(shard, 10)
    assert staged_copy(shared) is shared
