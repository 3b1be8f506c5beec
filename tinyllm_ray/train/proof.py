"""The evidence that a candidate's updates are what was asked for: which kernels they ran, and what they computed.

All of it is taken when times and peak memory are known. The profiled updates, and the one that parity is checked on,
are the training's next: real updates on real tokens, of which nothing that was measured depends.
"""

import math
import traceback
from dataclasses import dataclass, field

import torch

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.band import CHECKED_UPDATES, EARLY_UPDATES
from tinyllm_ray.measure.kernels import attention_backend, match, record_kernels
from tinyllm_ray.records import KernelTime, Proof, TrajectoryPoint
from tinyllm_ray.train.reference import check_parity
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

_CHECKED = frozenset((*EARLY_UPDATES, *CHECKED_UPDATES))
_PROFILED_UPDATES = 3
_PROFILE_LIMIT_SECONDS = 0.3
"""One whole update is proof; more make its times steadier. Three replayed or compiled ones take 0.1 s on an H200, three
eager ones, of far more launches, 0.5 s."""


class Watched:
    """A trainer as `measure.windows.measure` steps it, which keeps loss and norm of the checked updates.

    They stay on the device, copied, since an update that is replayed writes the next one's over them; two scalars a
    checked update, so that nothing waits for them inside a window.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self) -> Statistics:
        said = self._trainer.step()
        if self._trainer.updates in _CHECKED:
            self._kept[self._trainer.updates] = said.loss.clone(), said.grad_norm.clone()
        return said

    def synchronize(self) -> None:
        self._trainer.synchronize()

    def read(self) -> tuple[float, float]:
        return self._trainer.read()

    @property
    def targets_per_update(self) -> int:
        return self._trainer.targets_per_update

    @property
    def data_wait_seconds(self) -> float:
        return self._trainer.data_wait_seconds

    def trajectory(self) -> list[TrajectoryPoint]:
        """The checked updates so far, of a pack the means over its models; reading them waits for the device."""
        return [
            TrajectoryPoint(update=update, loss=_mean(loss), grad_norm=_mean(norm))
            for update, (loss, norm) in self._kept.items()
        ]


@dataclass
class Evidence:
    """What was found out about a candidate."""

    proof: Proof
    kernels: list[KernelTime] | None = None
    faults: list[str] = field(default_factory=list)
    """Why the candidate is not what was asked for, a line each."""


def gather_evidence(
    trainer: Trainer, trajectory: list[TrajectoryPoint], parity_over: tuple[TokenCache | None, str | None] | None
) -> Evidence:
    """Profile the next updates of `trainer`, and compare one with the reference where `parity_over` is given.

    That is the cache, or None for synthetic data, and the address of the range server that the trainer reads over.
    What cannot be found out, for want of memory for one, is a fault: a candidate without its proof is not believed.
    """
    asked = trainer.config.execution.sdpa_backend
    found = Evidence(Proof(attention_asked=asked, trajectory=trajectory))
    try:
        _profile(trainer, found)
        if parity_over is not None:
            parity, fault = check_parity(trainer, *parity_over)
            found.proof = found.proof.model_copy(update={"parity": parity})
            found.faults += [fault] if fault else []
    except Exception as error:  # said in the record; standard error is the candidate's log
        traceback.print_exc()
        said = str(error).strip().splitlines()
        found.faults.append(f"not proved: {type(error).__name__}: {said[0] if said else ''}")
    return found


def _profile(trainer: Trainer, found: Evidence) -> None:
    profile = record_kernels(
        trainer.step, trainer.synchronize, trainer.device, _PROFILED_UPDATES, _PROFILE_LIMIT_SECONDS
    )
    found.kernels = profile.kernels
    found.proof = found.proof.model_copy(
        update={
            "kernel_source": profile.source,
            "profiled_updates": profile.updates,
            "attention_seen": sorted(attention_backend(profile.kernels)),
        }
    )
    config = trainer.config
    if config.packing.models > 1 and config.packed_backward == "processes":
        return  # the models' attention runs in processes of their own, and is not among this one's kernels
    fault = match(config.execution.sdpa_backend, profile.kernels)
    found.faults += [fault] if fault else []


def _mean(values: torch.Tensor) -> float | None:
    mean = float(values.mean())
    return mean if math.isfinite(mean) else None
