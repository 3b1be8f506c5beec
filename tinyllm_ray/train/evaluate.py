"""Validation loss: the token-weighted mean over a stream of batches."""

from collections.abc import Iterable

import numpy as np
import torch

from tinyllm_ray.data.feed import widen
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama


def evaluate(model: Llama, batches: Iterable[np.ndarray], backend: str) -> tuple[float, int]:
    """Mean loss in nats a target over `batches` of rows [n, T + 1], and the number of targets.

    Each batch counts by its targets; the sum over batches is kept in float64 on the device, read once at the end.
    """
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
