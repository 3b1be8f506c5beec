"""Compares two ways to compute one loss and its gradients: a candidate's execution beside the reference's.

The measures are the difference of the losses over the reference's, and the norm of the gradients' difference over the
norm of the reference's, for all weights together and for every weight alone: a small weight whose gradient is wrong
shows in the latter only. Both sides have to start from equal weights and tokens, and should run a whole update, since
one micro-batch says nothing of how several are accumulated.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tinyllm_ray.figures import told_apart
from tinyllm_ray.records import Parity

Visit = Callable[[str, torch.Tensor], None]
"""Takes the gradient of the named weight; it may be overwritten as soon as the call returns."""
Side = Callable[[Visit], torch.Tensor | float]
"""Computes the gradients, shows each to the visitor once, in any order, and returns the loss."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors of the loss, of all gradients together, and of any weight's own gradient."""

    loss: float
    gradient: float
    weight: float


FLOAT32 = Tolerance(loss=1e-5, gradient=1e-4, weight=1e-3)
"""Other sums in float32. Seen on a CPU: 1e-7 of the loss, 2e-7 of the gradient, 5e-7 of a weight's."""
BFLOAT16 = Tolerance(loss=1e-3, gradient=0.02, weight=0.25)
"""bf16 autocast beside float32. Seen on a GH200: 1.4e-4 of the loss and 1.5% of the gradient with trained weights, 0.5%
with fresh ones. Models far smaller than 20m need more: on a CPU, with 16 features, after 20 updates, 6e-4, 5% and 8% of
a weight's gradient."""


@dataclass(frozen=True)
class Comparison:
    """Losses in nats a target; norms in float64."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_gradient_norm: float
    relative_gradient_error: float
    weight_errors: Mapping[str, float]
    """By weight, the norm of its gradient's difference over the norm of the reference's gradient."""

    @property
    def relative_loss_error(self) -> float:
        return _relative(abs(self.loss - self.reference_loss), abs(self.reference_loss))

    @property
    def worst_weight(self) -> str:
        """The weight whose own gradient differs most; one that is not a number before all others."""
        errors = self.weight_errors
        return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))

    def mismatch(self, tolerance: Tolerance) -> str | None:
        """Why the candidate is not the reference, in one line; None where it is, within `tolerance`."""
        worst = self.worst_weight
        checks = (
            ("the loss", self.relative_loss_error, tolerance.loss),
            ("the gradient", self.relative_gradient_error, tolerance.gradient),
            (f"the gradient of {worst}", self.weight_errors[worst], tolerance.weight),
        )
        for what, error, limit in checks:
            if not error <= limit:  # so that what is not a number is refused
                shown, most = told_apart(".2g", error, limit)
                return f"{what} differs by {shown} of the reference's, more than {most}"
        return None

    def record(self, updates: int, targets: int) -> Parity:
        """For a trial's record: weights that had had `updates` updates, and `targets` targets in this one."""
        worst = self.worst_weight
        return Parity(
            updates=updates,
            targets=targets,
            loss=_finite(self.loss),
            reference_loss=_finite(self.reference_loss),
            relative_loss_error=_finite(self.relative_loss_error),
            relative_gradient_error=_finite(self.relative_gradient_error),
            worst_weight=worst,
            worst_weight_error=_finite(self.weight_errors[worst]),
        )


def compare(candidate: Side, reference: Side) -> Comparison:
    """Run the reference, then the candidate, and compare loss and gradients.

    One copy of the reference's gradients is kept; the candidate's are looked at one by one, and nothing is read from
    the device before the end. A weight that only one side has a gradient for counts as zero on the other. Raises
    ValueError where two gradients of one name have different shapes, and where there are none.
    """
    kept: dict[str, torch.Tensor] = {}
    norms: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def keep(name: str, gradient: torch.Tensor) -> None:
        assert name not in kept, f"{name} was shown twice by the reference"
        kept[name] = gradient.detach().clone()

    def look(name: str, gradient: torch.Tensor) -> None:
        assert name not in norms, f"{name} was shown twice by the candidate"
        expected = kept.pop(name, None)
        norms[name] = _norms(gradient.detach(), torch.zeros_like(gradient) if expected is None else expected)

    reference_loss = reference(keep)
    loss = candidate(look)
    for name, expected in kept.items():
        norms[name] = _norms(torch.zeros_like(expected), expected)
    return _comparison(float(loss), float(reference_loss), norms)


def of_losses(weights: Mapping[str, torch.Tensor], losses: Sequence[Callable[[], torch.Tensor]]) -> Side:
    """A side that accumulates the mean of `losses`, one a micro-batch, by autograd; `.grad` stays untouched."""

    def side(visit: Visit) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        sums: list[torch.Tensor] | None = None
        for compute in losses:
            loss = compute() / len(losses)
            gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            total = total.to(loss.device) + loss.detach()
            # Cloned, as a replayed graph writes the next micro-batch's over them.
            if sums is None:
                sums = [gradient.clone() for gradient in gradients]
            else:
                for sum_, gradient in zip(sums, gradients, strict=True):
                    sum_.add_(gradient)
        for name, gradient in zip(weights, sums or [], strict=True):
            visit(name, gradient)
        return total

    return side


def of_update(
    step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]
) -> Side:
    """A side that runs a real update, `step`, which returns its loss, and shows what the optimizer was given.

    Those are the accumulated gradients after clipping, so that a clip that was left out shows too. The weights change.
    """

    def side(visit: Visit) -> torch.Tensor:
        def before_step(*_: object) -> None:
            for name, weight in weights.items():
                if weight.grad is not None:
                    visit(name, weight.grad)

        hook = optimizer.register_step_pre_hook(before_step)
        try:
            return step()
        finally:
            hook.remove()

    return side


def _norms(gradient: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms of the difference, of `gradient` and of `expected`, on the device, summed in float64."""
    if gradient.shape != expected.shape:  # which might broadcast
        raise ValueError(
            f"two gradients of one name have the shapes {tuple(gradient.shape)} and {tuple(expected.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(gradient.dtype, expected.dtype), torch.float32)
    difference = gradient.to(dtype) - expected.to(dtype)
    first, second, third = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (difference, gradient, expected))
    return first, second, third


def _comparison(
    loss: float, reference_loss: float, norms: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> Comparison:
    if not norms:
        raise ValueError("neither side has a gradient to compare")
    table = torch.stack([torch.stack(three) for three in norms.values()])
    difference, own, expected = torch.linalg.vector_norm(table, dim=0).tolist()
    return Comparison(
        loss=loss,
        reference_loss=reference_loss,
        gradient_norm=own,
        reference_gradient_norm=expected,
        relative_gradient_error=_relative(difference, expected),
        weight_errors={name: _relative(row[0], row[2]) for name, row in zip(norms, table.tolist(), strict=True)},
    )


def _relative(difference: float, size: float) -> float:
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
