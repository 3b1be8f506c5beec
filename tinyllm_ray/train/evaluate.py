"""Validation loss: the token-weighted mean over a stream of batches, with an execution of its own."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.data.feed import widen
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.model.losses import IGNORED, summed_cross_entropy, summed_cross_entropy_by_groups
from tinyllm_ray.train.update import tag_compile_cache

_GPU_TOKENS = 131_072
"""Least inputs of a forward pass on a GPU where none are asked for: 2% faster than half of it, 1.2 GB at 20m."""

_COMPILED_LOGITS = 2**29
"""Most logits at a time: 1 GiB, as compiled code holds them in bfloat16 alone. Twice as many gain 1%."""

_EAGER_LOGITS = {"cuda": 2**28, "cpu": 2**24}
"""Eager code holds them in float32 too, and once more for the softmax: 2.7 GB on a GPU."""

EAGER_EXTRA_SECONDS = 3.3e-7
"""That an eager target takes beside a compiled one on a GPU (20m, H200)."""
_PAYS_FROM_TARGETS = 30_000_000
"""Compiling costs 10 s with an empty cache."""


class Evaluator:
    """Evaluates one model, whose weights may change in between, as often as wanted.

    Hidden states are computed for a whole batch, logits for `chunk` targets at a time. Shorter rows are filled up with
    targets that do not count; compiled, smaller batches are too: one shape each, and one compilation for every split.
    It is compiled in the default mode whatever training's is: max-autotune takes 30 s more for 1%, and a batch keeps
    a GPU busy for 20 ms, beside which launches that CUDA graphs would spare are nothing.

    `expected_targets` is how many all evaluations of the run come to, where that is known.
    """

    def __init__(self, model: Llama, config: Config, device: torch.device, expected_targets: int | None = None) -> None:
        self._device = device
        self._backend = config.execution.sdpa_backend
        self._context = config.model.context
        self.rows = evaluation_rows(config, device)
        """Most rows of a batch."""
        self.compiled = is_compiled(config, device, expected_targets)
        most_logits = _COMPILED_LOGITS if self.compiled else _EAGER_LOGITS[device.type]
        self.chunk = _divisor(self.rows * self._context, most_logits // config.model.vocab_size)
        """Targets whose logits exist at a time."""
        self._hidden: Callable[[torch.Tensor], torch.Tensor] = model.hidden
        self._summed_loss = _build_summed_loss(model, self.compiled)
        if self.compiled:
            tag_compile_cache(config)
            self._hidden = torch.compile(model.hidden, dynamic=False, fullgraph=True)
            self._summed_loss = torch.compile(self._summed_loss, dynamic=False, fullgraph=True)

    def evaluate(self, batches: Iterable[np.ndarray]) -> tuple[float, int]:
        """Mean loss in nats a target over `batches`, and the number of targets.

        Batches are ids [at most `rows`, at most context + 1], each row's targets being its ids moved on by one. The
        host waits for the device at the end alone. What `batches` raises ends the evaluation and nothing else.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        with torch.no_grad(), sdpa_backend(self._backend):
            for rows in batches:
                total += self._sum(rows)
                count += rows.shape[0] * (rows.shape[1] - 1)
        if not count:
            raise ValueError("no targets to evaluate")
        return float(total) / count, count

    def _sum(self, rows: np.ndarray) -> torch.Tensor:
        """Loss over a batch's targets, summed in float64 over chunks that are summed in float32."""
        batch = self._to_device(rows)
        inputs, targets = self._fill_up(batch[:, :-1], 0), self._fill_up(batch[:, 1:], IGNORED)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        # As in training, around the compiled functions and not inside them.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            hidden = self._hidden(inputs).flatten(0, 1)
            chunks = zip(torch.split(hidden, self.chunk), torch.split(targets.flatten(), self.chunk), strict=True)
            for part, wanted in chunks:
                total += self._summed_loss(part, wanted)
        return total

    def _to_device(self, rows: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(rows)
        if self._device.type == "cuda":
            # PyTorch gives pinned memory out again once the copies from it are over, so that the host runs ahead.
            host = host.pin_memory()
        return widen(host.to(self._device, non_blocking=True))

    def _fill_up(self, ids: torch.Tensor, value: int) -> torch.Tensor:
        """`ids` as the first columns of as many rows of a whole context, compiled of all rows of a batch.

        Attention is causal, what follows disturbs none. A split's last targets alone are a length of their own, for
        which a backend may have no kernel: cuDNN has none for a single one (torch's sdp_utils.cpp).
        """
        shape = (self.rows if self.compiled else len(ids), self._context)
        if ids.shape == shape and not self.compiled:
            return ids
        out = ids.new_full(shape, value)
        out[: ids.shape[0], : ids.shape[1]] = ids
        return out


def evaluation_rows(config: Config, device: torch.device) -> int:
    """Most rows of a batch: as set, else the training's, and on a GPU at least as many as make 131,072 targets."""
    asked = config.evaluation_execution.micro_batch_size
    least = math.ceil(_GPU_TOKENS / config.model.context) if device.type == "cuda" else 1
    return asked or max(config.micro_batch_size, least)


def is_compiled(config: Config, device: torch.device, expected_targets: int | None = None) -> bool:
    """Whether the loss is compiled: as set, else on a GPU where training is and enough is evaluated to make up for it.

    `expected_targets` None counts as enough.
    """
    asked = config.evaluation_execution.update
    if asked is not None:
        return asked != "eager"
    enough = expected_targets is None or expected_targets >= _PAYS_FROM_TARGETS
    return device.type == "cuda" and config.execution.update != "eager" and enough


def _build_summed_loss(model: Llama, compiled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """From hidden states [N, width] and targets [N] to the sum of the losses."""
    cross_entropy = summed_cross_entropy_by_groups if compiled else summed_cross_entropy

    def summed_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.logits(hidden), targets)

    return summed_loss


def evaluate(model: Llama, batches: Iterable[np.ndarray], backend: str) -> tuple[float, int]:
    """As `Evaluator.evaluate` in the plainest way, which that is compared with: `Llama.loss` of each batch, eager."""
    device = model.embedding.weight.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for rows in batches:
            batch = widen(torch.from_numpy(rows).to(device))
            targets = batch[:, 1:]
            with sdpa_backend(backend):
                total += model.loss(batch[:, :-1], targets) * targets.numel()
            count += targets.numel()
    return float(total) / count, count


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(size for size in range(1, min(number, max(most, 1)) + 1) if number % size == 0)
