"""The collector rests while things are imported, and takes up its work again whatever happened."""

import gc
from collections.abc import Iterator

import pytest

from tinyllm_ray.train.collector import collector_at_rest


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_inside_and_what_lives_is_set_aside_afterwards() -> None:
    gc.unfreeze()
    with collector_at_rest():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)


def test_a_failure_inside_leaves_the_collector_at_work() -> None:
    with pytest.raises(ImportError), collector_at_rest():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_switched_off_stays_off() -> None:
    gc.disable()
    with collector_at_rest():
        pass
    assert not gc.isenabled()
