"""How a capture that fails is explained, without a GPU: PyTorch's parts are played, the rest is real."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tinyllm_ray.train.cuda_capture import CudaCapture
from tinyllm_ray.train.trial import is_out_of_memory
from tinyllm_ray.train.update import Statistics

NO_END = RuntimeError("CUDA error: operation failed due to a previous error during capture\nCompile with DSA")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contexts in their order; a capture whose body fails fails at its end as well, with another error."""
    seen: list[str] = []

    @contextmanager
    def stream(name: object) -> Iterator[None]:
        seen.append(f"enter {name}")
        try:
            yield
        finally:
            seen.append(f"leave {name}")

    @contextmanager
    def graph(*_: object, **settings: object) -> Iterator[None]:
        seen.append(f"capture in mode {settings['capture_error_mode']}")
        try:
            yield
        except Exception:
            raise NO_END from None

    side = SimpleNamespace(wait_stream=lambda other: seen.append(f"side waits for {other.name}"), name="side")
    user = SimpleNamespace(wait_stream=lambda other: seen.append(f"user waits for {other.name}"), name="user")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: user)
    monkeypatch.setattr(torch.cuda, "stream", lambda which: stream(which.name))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def failing_with(error: Exception) -> Callable[[], Statistics]:
    def embed_rows() -> Statistics:
        raise error

    return embed_rows


@pytest.fixture
def capture(entered: list[str]) -> CudaCapture:
    return CudaCapture(torch.device("cuda", 0))


def test_the_first_error_is_told_in_one_line_with_its_place(capture: CudaCapture, entered: list[str]) -> None:
    failure = RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it\n")
    with pytest.raises(RuntimeError) as raised:
        capture.capture(failing_with(failure))
    assert str(raised.value).startswith(
        "execution.update: graph: no capture of this update: RuntimeError: CUDA error: operation not permitted when "
        "stream is capturing (in embed_rows, test_cuda_capture.py:"
    )
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is failure
    assert entered == ["enter user", "capture in mode thread_local", "leave user"], "the caller's stream is back"


def test_missing_memory_stays_what_it_is(capture: CudaCapture) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        capture.capture(failing_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")))
    assert is_out_of_memory(raised.value)


def test_warming_up_waits_for_the_callers_stream_and_has_it_wait(capture: CudaCapture, entered: list[str]) -> None:
    found = Statistics(torch.zeros(()), torch.zeros(()))
    assert capture.warm_up(lambda: found) is found
    assert entered == ["side waits for user", "enter side", "leave side", "user waits for side"]
