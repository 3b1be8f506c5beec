"""Candidates share a compile cache, whose key does not hold the SDPA backend: the tag keeps their graphs apart."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tinyllm_ray.config import Config
from tinyllm_ray.measure.kernels import attention_backend, match, record_kernels
from tinyllm_ray.model.attention import attend, sdpa_backend
from tinyllm_ray.records import KernelTime
from tinyllm_ray.train import update as update_module
from tinyllm_ray.train.update import build_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")

MakeConfig = Callable[..., Config]


class Attention:
    """Instead of a decoder, whose kernels take a compiler the better part of a minute."""

    def loss(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attend(query, key, query)


def compiled_kernels(config: Config, device: str = "cpu") -> list[KernelTime]:
    """What a process that starts with nothing but the cache runs."""
    torch._dynamo.reset()
    counters.clear()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query = torch.randn(2, 2, 64, 64, device=device, dtype=dtype, requires_grad=device != "cpu")
    loss = build_loss(Attention(), config, torch.device(device))  # type: ignore[arg-type]

    def step() -> None:
        with sdpa_backend(config.execution.sdpa_backend):
            attended = loss(query, query.detach())
        if query.requires_grad:
            attended.backward(torch.ones_like(attended))

    step()
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    return record_kernels(step, synchronize, torch.device(device), updates=1).kernels


@pytest.fixture
def asked(tiny: MakeConfig) -> Callable[[str], Config]:
    return lambda backend: tiny(execution={"update": "compiled", "sdpa_backend": backend})


@pytest.fixture(autouse=True)
def _one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.compiler.config.patch(cache_key_tag=""):
        yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def _no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_module, "tag_compile_cache", lambda config: "")


def hits() -> tuple[int, int]:
    """Graphs taken out of the cache, and put there."""
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's test is below")
class TestCpu:
    @pytest.mark.usefixtures("_no_tag")
    def test_without_the_tag_one_backend_gets_the_graph_of_another_and_the_proof_says_so(
        self, asked: Callable[[str], Config]
    ) -> None:
        assert match("flash", compiled_kernels(asked("flash"))) is None
        assert hits() == (0, 1)
        foreign = compiled_kernels(asked("math"))
        assert hits() == (1, 0)
        reason = match("math", foreign)
        assert reason is not None
        assert reason.startswith("sdpa_backend math: flash ran: aten::_scaled_dot_product_flash_attention")

    def test_with_it_each_backend_has_a_graph_of_its_own(self, asked: Callable[[str], Config]) -> None:
        compiled_kernels(asked("flash"))
        assert hits() == (0, 1)
        compiled_kernels(asked("auto"))
        assert hits() == (0, 1)
        compiled_kernels(asked("flash"))
        assert hits() == (1, 0), "equal executions do share one"

    @pytest.mark.slow  # math attention's kernels are compiled
    @pytest.mark.usefixtures("compiler")
    def test_math_after_flash_runs_math(self, asked: Callable[[str], Config]) -> None:
        for backend in ("flash", "math"):
            assert attention_backend(compiled_kernels(asked(backend))) == {backend}


@pytest.mark.gpu
class TestGpu:
    @pytest.mark.parametrize("backend", ["flash", "efficient", "math"])
    def test_after_cudnn_each_backend_runs_its_own_kernels(self, backend: str, asked: Callable[[str], Config]) -> None:
        """Over a shared cache `efficient` was seen to run cuDNN's."""
        for one in ("cudnn", backend):
            assert match(one, compiled_kernels(asked(one), "cuda")) is None
