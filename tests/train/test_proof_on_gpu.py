"""On a GPU: what was asked is what ran, in whole trials of every kind of update, replayed ones too; real kernels."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from whole_trials import measured

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.execution import SdpaBackend
from tinyllm_ray.measure.kernels import by_category
from tinyllm_ray.model.attention import available_backends
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.judgement import judged

pytestmark = pytest.mark.gpu

MakeConfig = Callable[..., Config]
Measure = Callable[..., TrialRecord]

PROTOCOL = Protocol(warmup_updates=10, windows=1, updates_per_window=50)
RATE = 0.0003
"""At three times that the few rows are known by heart after 60 updates, and a loss of 0.66 nats differs by its 0.1%."""
REPLAYED = [{"update": "compiled", "compile_mode": "reduce-overhead"}, {"update": "graph"}]
KINDS = [{"update": "eager"}, {"update": "compiled"}, *REPLAYED]
BACKENDS = [
    name for name in get_args(SdpaBackend) if name not in ("auto", "flex") and not available_backends("cuda")[name]
]


@pytest.fixture(autouse=True)
def _each_on_its_own() -> Iterator[None]:
    """As in a process of its own: what Dynamo traced for one backend it would give the next, whose own it cannot tell
    by any guard; and the pools of graphs stay the process's until they are released."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def measure(tiny: MakeConfig, tiny_cache: TokenCache) -> Measure:
    def run(execution: dict[str, Any], parity: bool = False) -> TrialRecord:
        config = tiny(
            model={"width": 128, "heads": 2, "ffn": 256, "context": 128},
            training={"tokens_per_update": 1024, "token_budget": 1024 * 1000},
            optimizer={"peak_learning_rate": RATE},
            execution=execution,
        )
        return measured(config, tiny_cache, PROTOCOL, parity)

    return run


@pytest.fixture(scope="module")
def baseline(measure: Measure) -> TrialRecord:
    return measure({"update": "eager"}, parity=True)


def test_the_baseline_equals_the_reference(baseline: TrialRecord) -> None:
    assert (baseline.fate, baseline.reason) == (Fate.COMPLETE, None)
    assert baseline.proof is not None
    assert baseline.proof.kernel_source == "device"
    assert baseline.proof.parity is not None
    assert baseline.proof.parity.relative_gradient_error is not None
    assert baseline.proof.parity.relative_gradient_error > 1e-6, "bf16 beside float32, not the same twice"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.get("compile_mode", kind["update"]))
def test_what_was_asked_is_what_ran(
    kind: dict[str, Any], backend: str, measure: Measure, baseline: TrialRecord
) -> None:
    record = measure({**kind, "sdpa_backend": backend}, parity=True)
    record = judged(record, [baseline], baseline.execution_identity, lambda update: RATE * update)
    assert record.fate == Fate.COMPLETE, record.reason
    assert record.proof is not None
    assert record.kernels is not None
    assert record.proof.attention_seen == [backend]
    sums = by_category(record.kernels)
    assert all(sums[category][0] > 0 for category in ("attention_forward", "matmul", "loss", "optimizer"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.get("compile_mode", kind["update"]))
def test_every_figure_of_memory_is_the_devices(kind: dict[str, Any], measure: Measure) -> None:
    memory = measure(kind).memory
    assert memory.peak_allocated_bytes is not None
    assert memory.peak_reserved_bytes is not None
    assert memory.graph_pool_bytes is not None
    assert 0 < memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert (memory.graph_pool_bytes > 0) == (kind in REPLAYED)
    assert memory.graph_pool_bytes <= memory.peak_reserved_bytes
    assert memory.used_bytes is None or memory.used_bytes >= memory.graph_pool_bytes


def test_eight_layers_of_kernels_compile(tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    """In seconds, where printing what the loss's argument was made from took minutes: twice as long a layer more."""
    kernels = [f"{part}_kernel" for part in ("loss", "norm", "rotary", "activation", "optimizer")]
    config = tiny(
        model={"layers": 8, "width": 128, "heads": 2, "ffn": 256, "context": 128},
        training={"tokens_per_update": 1024, "token_budget": 1024 * 1000},
        execution={"update": "compiled", "residual_dtype": "bfloat16", **dict.fromkeys(kernels, "triton")},
    )
    record = measured(config, tiny_cache, PROTOCOL, parity=False)
    assert record.fate == Fate.COMPLETE, record.reason
