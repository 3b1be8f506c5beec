"""One update beside the float32 reference: loss and gradients of equal weights and rows, computed the plain way.

The reference is the decoder as `model.llama` has it, operator by operator in float32, on rows that a loader of its own
reads. The candidate makes a real update, accumulated, clipped and, where it is, replayed. What its optimizer was given
follows from the first moment, m' = beta m + (1 - beta) g, so that no kind of update has to show its gradients.
"""

from collections.abc import Iterator
from contextlib import closing, nullcontext

import torch

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.feed import widen
from tinyllm_ray.measure.parity import BFLOAT16, FLOAT32, Comparison, Side, Tolerance, Visit, compare
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama, allocate
from tinyllm_ray.model.packed import deal
from tinyllm_ray.records import Parity
from tinyllm_ray.train.optimizer import clip_gradients
from tinyllm_ray.train.recipe import solo_config
from tinyllm_ray.train.trainer import Trainer, build_feed

_TARGETS_AT_ONCE = 2048
"""Of the reference's passes: 1 GiB of float32 logits and what is made of them at 32,000 tokens; and the scores of two
rows of 1,024, which math attention keeps for every layer, about 12 GiB in 500m."""
_ALLOWANCE = 2.0
"""Times the error of ordinary bf16 autocast on the same weights, where that is more than the tolerance."""


def check_parity(trainer: Trainer, cache: TokenCache | None, range_server: str | None) -> tuple[Parity, str | None]:
    """Make the trainer's next update and compare it; the figures, and why they are not the reference's.

    Takes four times the weights' bytes beside the trainer. A small model's gradients differ by more than the tolerance
    in ordinary bf16 too (5% with 16 features), which is then measured.
    """
    made = trainer.updates
    rows = _next_rows(trainer, cache, range_server)
    found = compare(_updated(trainer), _plain(trainer, rows, low=False))
    low = in_bf16(trainer.device)
    fault = found.mismatch(BFLOAT16 if low else FLOAT32)
    if fault is not None and low:
        rows = _next_rows(trainer, cache, range_server)
        ordinary = compare(_plain(trainer, rows, low=True), _plain(trainer, rows, low=False))
        fault = found.mismatch(_no_less_than(ordinary))
    return found.record(made, trainer.targets_per_update), fault and f"parity with float32: {fault}"


def in_bf16(device: torch.device) -> bool:
    """Whether the trainer computes in bf16 autocast there (update.py, `build_loss`)."""
    return device.type == "cuda"


def _next_rows(trainer: Trainer, cache: TokenCache | None, range_server: str | None) -> torch.Tensor:
    with closing(build_feed(trainer.config, cache, trainer.device, range_server, trainer.updates)) as feed:
        return widen(feed.next())


def _no_less_than(ordinary: Comparison) -> Tolerance:
    worst = ordinary.weight_errors[ordinary.worst_weight]
    return Tolerance(
        max(BFLOAT16.loss, _ALLOWANCE * ordinary.relative_loss_error),
        max(BFLOAT16.gradient, _ALLOWANCE * ordinary.relative_gradient_error),
        max(BFLOAT16.weight, _ALLOWANCE * worst),
    )


def _plain(trainer: Trainer, rows: torch.Tensor, low: bool) -> Side:
    """The reference on the weights that the trainer has when it runs; `low` with bf16 autocast."""

    def side(visit: Visit) -> torch.Tensor:
        config, losses = trainer.config, []
        autocast = torch.autocast(trainer.device.type, torch.bfloat16) if low else nullcontext()
        for worker, weights, own in _models(trainer, rows):
            model = allocate(config.model).to(trainer.device)
            model.load_state_dict(weights)
            losses.append(torch.zeros((), device=trainer.device))
            at_once = max(1, _TARGETS_AT_ONCE // config.model.context)
            for part in (own[at : at + at_once] for at in range(0, len(own), at_once)):
                with sdpa_backend("math"), autocast:
                    loss = model.loss(part[:, :-1], part[:, 1:]) * (len(part) / len(own))
                torch.autograd.backward(loss)
                losses[-1] = losses[-1] + loss.detach()
            clip_gradients(model.parameters(), config.optimizer.gradient_clip)
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                visit(f"{worker}{name}", weight.grad)
        return torch.stack(losses).mean()

    return side


def _models(trainer: Trainer, rows: torch.Tensor) -> Iterator[tuple[str, dict[str, torch.Tensor], torch.Tensor]]:
    """What stands before each model's weights' names, the weights, and its rows."""
    model = trainer.model
    if isinstance(model, Llama):
        yield "", {name: weight.detach() for name, weight in model.named_parameters()}, rows
        return
    for worker, own in enumerate(deal(rows, model.models)):
        yield f"model {worker}: ", model.worker_weights(worker), own


def _updated(trainer: Trainer) -> Side:
    """The trainer's next update, and what its optimizer was given."""

    def side(visit: Visit) -> torch.Tensor:
        before = {name: moment.clone() for name, moment, _ in _first_moments(trainer)}
        loss = trainer.step().loss
        for name, moment, beta in _first_moments(trainer):
            visit(name, (moment - beta * before.pop(name)) / (1 - beta))
        return loss.mean()

    return side


def _first_moments(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor, float]]:
    """AdamW's, by the weight's name, with its beta."""
    model, config = trainer.model, trainer.config
    alone = config.packing.models > 1 and not config.packing.mixed
    for name, weight in model.named_parameters():
        moment = trainer.optimizer.state[weight]["exp_avg"]
        if isinstance(model, Llama):
            yield name, moment, config.optimizer.betas[0]
            continue
        for worker, own in enumerate(moment):
            settings = solo_config(config, worker) if alone else config
            yield f"model {worker}: {name}", own, settings.optimizer.betas[0]
