"""What the GPU tests compute: losses, gradients and kernels of an execution, and the float32 reference beside it."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Update

Weights = dict[str, torch.Tensor]

HOWS: dict[str, dict[str, Any]] = {
    "eager": {"update": "eager"},
    "default": {"update": "compiled", "compile_mode": "default"},
    "reduce-overhead": {"update": "compiled", "compile_mode": "reduce-overhead"},
}
"""The kinds of update."""

BACKENDS = ("auto", "flash", "cudnn", "efficient", "math")

_FAMILIES = {"cudnn": r"cudnn.*sdpa|sdpa.*cudnn", "flash": r"flash_(fwd|bwd)", "efficient": r"fmha_cutlass|fmha"}
"""Names of attention kernels by backend, the first that matches; math has none of them."""


class Computed(NamedTuple):
    """What one update found, on the device, and the attention kernels that it ran."""

    loss: float
    gradients: Weights
    kernels: list[str]


class Error(NamedTuple):
    """Relative distances from the reference."""

    loss: float
    gradient: float


def without_checks(config: Config, **execution: Any) -> Config:
    """The configuration under an execution that validation may refuse."""
    settings = ExecutionConfig.model_construct(**(config.execution.model_dump() | execution))
    return config.model_copy(update={"execution": settings})


def rows_of(cache: TokenCache, rows: int, context: int, device: torch.device) -> torch.Tensor:
    """Rows of real tokens, int64 [rows, context + 1]."""
    with RowLoader(cache, context=context, seed=1) as loader:
        return torch.from_numpy(loader.next(rows).astype("int64")).to(device)


def build(config: Config, weights: Weights, device: torch.device) -> Llama:
    model = initialize(config.model, config.training.seed)
    model.load_state_dict(weights, strict=False)
    return model.to(device)


def compute(config: Config, weights: Weights, batch: torch.Tensor, updates: int = 4) -> Computed:
    """The last of a few updates at rate 0, which change no weight; from the third on a CUDA graph replays."""
    (found,) = compute_all(config, [weights], batch, updates)
    return found


def compute_all(config: Config, sets: list[Weights], batch: torch.Tensor, updates: int = 4) -> Iterator[Computed]:
    """As `compute` for several sets of weights, which one tracing serves. Expects `gradient_clip: off`."""
    model = build(config, sets[0], batch.device)
    optimizer = build_optimizer(model, config.optimizer, batch.device)
    update = Update(model, optimizer, config)
    gradients: Weights = {}

    def keep(*_: object) -> None:
        gradients.update(
            {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        )

    optimizer.register_step_pre_hook(keep)
    for weights in sets:
        model.load_state_dict(weights, strict=False)
        for _ in range(updates - 1):
            update(batch, 0.0)
        with attention_kernels(batch.device) as kernels:
            loss = update(batch, 0.0).loss.item()
        yield Computed(loss, dict(gradients), kernels)


def reference(config: Config, weights: Weights, batch: torch.Tensor, rows: int = 8) -> Computed:
    """Plain float32 on the math backend, without TF32, a few rows at a time for their memory."""
    torch.set_float32_matmul_precision("highest")
    model = build(config, weights, batch.device)
    total = 0.0
    parts = torch.split(batch, rows)
    with sdpa_backend("math"):
        for part in parts:
            loss = model.loss(part[:, :-1], part[:, 1:]) * (len(part) / len(batch))
            loss.backward()
            total += loss.item()
    return Computed(
        total, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, []
    )


def error(found: Computed, expected: Computed) -> Error:
    """Global: the norm of all gradients' difference over the norm of all."""
    assert found.gradients.keys() == expected.gradients.keys()
    pairs = [(found.gradients[name].double(), gradient.double()) for name, gradient in expected.gradients.items()]
    difference = sum((one - other).square().sum() for one, other in pairs)
    whole = sum(other.square().sum() for _, other in pairs)
    assert isinstance(difference, torch.Tensor)
    return Error(abs(found.loss - expected.loss) / expected.loss, float((difference / whole).sqrt()))


@contextmanager
def attention_kernels(device: torch.device) -> Iterator[list[str]]:
    """The attention kernels that ran while entered, known at the end; also those of replayed CUDA graphs."""
    kernels: list[str] = []
    if device.type != "cuda":
        yield kernels
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        yield kernels
        torch.cuda.synchronize()
    names = {event.key for event in profiled.key_averages()}
    kernels += sorted(name for name in names if family([name]) != "math")


def family(kernels: list[str]) -> str:
    """The one backend whose kernels these are; "mixed" where there are several."""
    found = {
        next((name for name, pattern in _FAMILIES.items() if re.search(pattern, k, re.I)), "math") for k in kernels
    }
    found = found - {"math"} or {"math"}
    return found.pop() if len(found) == 1 else "mixed"


def digest_of_run(config: Config, updates: int) -> str:
    """SHA-256 over the losses of a few updates on a synthetic batch and the weights after them."""
    digest = hashlib.sha256()
    with Trainer(config, None) as trainer:
        losses = [trainer.step().loss for _ in range(updates)]
        for tensor in (torch.stack(losses), *trainer.model.parameters()):
            digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
