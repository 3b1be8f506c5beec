"""What a candidate's process says, and which errors mean that memory was missing."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Memory, Window
from tinyllm_ray.train import trial as trial_module
from tinyllm_ray.train.trial import is_out_of_memory, run_trial
from tinyllm_ray.train.trial_request import TrialRequest

MakeConfig = Callable[..., Config]

PROTOCOL = Protocol(data_mode="synthetic", warmup_updates=2, windows=2, updates_per_window=3)


def events_of(
    config: Config, cache: str | None = None, protocol: Protocol = PROTOCOL, **changes: Any
) -> list[dict[str, Any]]:
    request = TrialRequest(
        study="s",
        candidate="c001",
        label="l",
        config=config.model_dump(mode="json"),
        protocol=protocol,
        cache=cache,
        cache_identity=None,
        limit_seconds=60,
        **changes,
    )
    events: list[dict[str, Any]] = []
    run_trial(request, events.append, time.perf_counter())
    return events


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event.get("stage", event["event"]) for event in events]


def real(protocol: Protocol) -> Protocol:
    return protocol.model_copy(update={"data_mode": "real"})


class TestEvents:
    def test_a_measured_candidate_tells_each_stage(self, tiny: MakeConfig) -> None:
        events = events_of(tiny())
        assert names(events) == ["start", "compile", "warmup", "windows", "window", "window", "proof", "result"]
        assert all(events[at]["seconds"] > 0 for at in (1, 2, 3))
        assert {"fork", "runtime", "model_and_optimizer", "loader"} <= set(events[1]["stages"])
        windows = [Window.model_validate(event["window"]) for event in events[4:6]]
        assert [(window.updates, window.targets) for window in windows] == [(3, 384), (3, 384)]
        result = events[-1]
        assert events[3]["seconds"] >= events[2]["seconds"], "the whole warm-up"
        rates = sorted(window.targets_per_second for window in windows)
        assert rates[0] <= result["targets_per_second"] <= rates[1]
        assert result["threads"] == 1
        assert Memory.model_validate(result["memory"]).used_bytes
        assert all(Device.model_validate(device) for device in events[1]["devices"])

    @pytest.mark.parametrize("mixing", [{}, {"topology": "complete", "scheme": "awc"}])
    def test_a_pack_is_measured_by_the_targets_of_all_its_models(
        self, tiny: MakeConfig, tiny_cache: TokenCache, mixing: dict[str, str]
    ) -> None:
        config = tiny(packing={"models": 2, **mixing}, execution={"micro_batch_size": 2})
        events = events_of(config, str(tiny_cache.folder), real(PROTOCOL))
        windows = [Window.model_validate(event["window"]) for event in events[4:6]]
        assert events[-1]["event"] == "result"
        assert [window.targets for window in windows] == [3 * 128 * (1 if mixing else 2)] * 2
        assert all(window.loss is not None and 3 < window.loss < 5 for window in windows)

    def test_tokens_are_read_in_data_mode_real(self, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
        synthetic, tokens = events_of(tiny()), events_of(tiny(), str(tiny_cache.folder), real(PROTOCOL))
        assert names(tokens) == names(synthetic)
        assert tokens[-3]["window"]["loss"] != pytest.approx(synthetic[-3]["window"]["loss"], rel=1e-3)

    def test_real_without_a_cache_is_no_measurement(self, tiny: MakeConfig) -> None:
        assert names(events_of(tiny(), None, real(PROTOCOL))) == ["start", "error"]

    def test_a_cache_that_is_not_there(self, tiny: MakeConfig) -> None:
        *_, error = events_of(tiny(), "/nowhere", real(PROTOCOL))
        assert error["event"] == "error"
        assert error["reason"].startswith("ConfigError: /nowhere")
        assert not error["out_of_memory"]

    def test_on_another_kind_of_device_than_the_studys_it_is_no_measurement(self, tiny: MakeConfig) -> None:
        """A PyTorch without CUDA on a GPU's node would pass off a CPU's figure as a GPU's."""
        here, other = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
        *_, error = events_of(tiny(), device_kind=other)
        assert error["event"] == "error"
        assert error["reason"].startswith(f"ConfigError: the study is for {other}, and PyTorch {torch.__version__} ")
        assert names(events_of(tiny(), device_kind=here))[-1] == "result"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN may serve here")
    def test_what_is_raised_is_the_last_event(self, tiny: MakeConfig) -> None:
        events = events_of(tiny(execution={"sdpa_backend": "cudnn"}))
        assert names(events) == ["start", "error"]
        assert events[-1]["reason"].startswith("ConfigError: execution.sdpa_backend: 'cudnn' (a CPU has ")

    @pytest.mark.parametrize(
        ("error", "reason", "out_of_memory"),
        [
            (torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"), "OutOfMemoryError: CUDA out of memory.", True),
            (ValueError(), "ValueError: ", False),
            (ValueError("\n first\nsecond"), "ValueError: first", False),
        ],
    )
    def test_the_reason_is_one_line(
        self,
        tiny: MakeConfig,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        reason: str,
        out_of_memory: bool,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(trial_module, "Trainer", fail)
        *_, event = events_of(tiny())
        assert (event["reason"], event["out_of_memory"]) == (reason, out_of_memory)
        log = capsys.readouterr().err  # a candidate's standard error is its log
        assert "Traceback" in log
        assert type(error).__name__ in log

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
    def test_an_order_to_stop_is_no_result(
        self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
    ) -> None:
        def fail(*_: object) -> None:
            raise stop

        monkeypatch.setattr(trial_module, "Trainer", fail)
        with pytest.raises(stop):
            events_of(tiny())


class TestOutOfMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
            MemoryError(),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            InductorError(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), None),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_these_are(self, error: BaseException) -> None:
        assert is_out_of_memory(error)

    def test_what_the_cpu_allocator_raises_is(self) -> None:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**60)
        assert is_out_of_memory(raised.value)

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
            RuntimeError("Triton Error [CUDA]: out of resource: shared memory"),
            RuntimeError("No available kernel. Aborting execution."),
            ValueError("CUDA out of memory is how this text reads"),
            OSError(28, "No space left on device"),
            KeyboardInterrupt(),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_these_are_not(self, error: BaseException) -> None:
        assert not is_out_of_memory(error)
