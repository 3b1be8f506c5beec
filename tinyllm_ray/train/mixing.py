"""Who averages weights with whom in decentralised training, how much, and the averaging itself.

A mixing matrix W [N, N] of an update turns the weights x_j of N workers into sum_j W_ij x_j. All are doubly stochastic:
each row's sum of one keeps a consensus, each column's keeps the average of the workers (Lian et al., arXiv 1705.09056).
The scheme says where the update mixes; gradients are always those of the local weights, moments are never mixed:

- `awc`, adapt while combine: x_i <- sum_j W_ij x_j, then the optimizer's step (Wang et al., arXiv 2410.11998);
- `atc`, adapt then combine: the optimizer's step, then the same (Cattivelli and Sayed, IEEE TSP 58(3), 2010).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import numpy as np
import torch

from tinyllm_ray.config import decimal
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.sections import Topology


def mixing_matrix(topology: str, workers: int, update: int) -> np.ndarray:
    """W of update `update` (0-based), float64 [workers, workers].

    - `complete`: everyone takes the average of all.
    - `one_peer_ring`: pairs of neighbours average. Update t pairs (t, t+1), (t+2, t+3), ... around the ring, so that
      each worker's partner is now on one side, now on the other (arXiv 2410.11998). An odd ring has no perfect
      matching: worker t-1 rests, and resting goes round (periodic gossip; Liu et al., Proc. IEEE 99(9), 2011).
    - `one_peer_exponential`: worker i takes half of worker i + 2^(t mod ceil(log2 N)) (Assran et al., arXiv 1811.10792;
      Ying et al., arXiv 2110.13363). One cycle makes the exact average where N is a power of two, else comes near it.

    One worker alone keeps its weights. Raises ConfigError for another name or no workers.
    """
    check_topology(topology, workers)
    matrix = np.zeros((workers, workers))
    if topology == "complete":
        matrix[:] = 1 / workers
    elif topology == "one_peer_ring":
        partner = np.arange(workers)
        for left in range(update, update + workers - 1, 2):
            one, other = left % workers, (left + 1) % workers
            partner[one], partner[other] = other, one
        _share(matrix, partner)
    else:
        hop = 2 ** (update % mixing_period(topology, workers)) if workers > 1 else 0
        _share(matrix, (np.arange(workers) + hop) % workers)
    return matrix


def mixing_period(topology: str, workers: int) -> int:
    """Number of updates after which a topology's matrices repeat. Raises ConfigError as `mixing_matrix`."""
    check_topology(topology, workers)
    if topology == "complete" or workers < 3:
        return 1
    if topology == "one_peer_ring":
        return workers if workers % 2 else 2
    return math.ceil(math.log2(workers))


def check_topology(topology: str, workers: int) -> None:
    """Raises ConfigError where there is no such topology, or nobody to mix."""
    if topology not in get_args(Topology):
        raise ConfigError(f"topology {topology!r} is not known; take one of {', '.join(get_args(Topology))}")
    if workers < 1:
        raise ConfigError(f"{workers} models cannot be mixed; take 1 or more")


def consensus_weights(rates: Sequence[float], start_fraction: float, power: float) -> list[float]:
    """Adaptive consensus: g of every update of a run whose learning rates are `rates`.

    1 before update ceil(start_fraction x updates), from there on (rate / largest rate from there on)^power: mixing
    fades with the learning rate, and begins to fade where it stood.
    """
    start = math.ceil(decimal(start_fraction) * len(rates))
    largest = max(rates[start:], default=0.0)
    fading = [(rate / largest) ** power if largest else 1.0 for rate in rates[start:]]
    return [1.0] * min(start, len(rates)) + fading


def weaken(matrix: np.ndarray, weight: float) -> np.ndarray:
    """g W + (1 - g) I."""
    weakened: np.ndarray = weight * matrix + (1 - weight) * np.eye(len(matrix))
    return weakened


def mix(parameters: Iterable[torch.Tensor], matrix: torch.Tensor) -> None:
    """Replace weights [N, ...] by their mixture, in place; `matrix` is W [N, N] in their dtype, on their device.

    In full precision whatever autocast and the TF32 setting are. The floor is 8 bytes a float32 weight (each read and
    written once); product and copy move 16.
    """
    device = matrix.device.type
    with torch.no_grad(), torch.autocast(device, enabled=False), _full_precision():
        for weight in parameters:
            rows = weight.detach().flatten(1)
            rows.copy_(matrix @ rows)


def consensus_distance(packed: Iterable[torch.Tensor], average: Iterable[torch.Tensor]) -> torch.Tensor:
    """How far apart models are whose weights are `packed`, each [N, ...], and on average `average`; on their device.

    The root mean square over models of the distance of their weights to the average (Kong et al., arXiv 2102.04828),
    relative to the average's norm. One model's differences exist at a time.
    """
    weights, means = [weight.detach() for weight in packed], [weight.detach() for weight in average]
    squares = []
    for model in range(len(weights[0])):
        apart = torch._foreach_sub([weight[model] for weight in weights], means)
        squares.append(torch.stack(torch._foreach_norm(apart)).square().sum())
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(means)))
    distance: torch.Tensor = torch.stack(squares).mean().sqrt() / norm
    return distance


def _share(matrix: np.ndarray, partner: np.ndarray) -> None:
    """Half one's own, half one's partner's; all one's own where one is one's partner."""
    workers = np.arange(len(matrix))
    matrix[workers, workers] += 0.5
    matrix[workers, partner] += 0.5


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
