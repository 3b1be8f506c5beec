"""A run's result: how it ended, what it reached, and what it took."""

import math
from statistics import fmean
from typing import Any

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.unigram import unigram_level
from tinyllm_ray.measure.environment import devices, source_identity
from tinyllm_ray.measure.flops import flop_per_target, peak_flops
from tinyllm_ray.train.state import RunState
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.validation import Evaluated


def build_result(trainer: Trainer, cache: TokenCache, state: RunState) -> dict[str, Any]:
    """What result.json holds beside status, validation and the session's own seconds.

    Training throughput leaves out starts, evaluations and checkpoints; elapsed throughput counts every second since
    the process began. The share of the device's peak is null where the peak is not known.
    """
    config, source, device = trainer.config, source_identity(), devices()[0]
    return (
        _progress(config, state)
        | {
            "levels": {"uniform": math.log(cache.vocab_size), "unigram": unigram_level(cache)},
            "memory": trainer.peak_memory().model_dump(),
            "device": str(trainer.device),
            "device_name": device.name,
            "threads": trainer.threads,
            "cache_identity": cache.identity,
            "source_identity": source.sha256,
            "source_dirty": source.dirty,
        }
        | _throughput(config, state, device.name)
    )


def note_bests(state: RunState, losses: list[float]) -> None:
    """Keep the best evaluation of each model that was evaluated, after one that found `losses`."""
    bests = list(state.bests) or [state.best] * len(losses)
    for model, loss in enumerate(losses):
        best = bests[model]
        if math.isfinite(loss) and (best is None or loss < best["loss"]):
            bests[model] = {"loss": loss, "epoch": state.epochs, "step": state.step}
    if len(losses) == 1:
        state.best = bests[0]
    else:
        state.bests = bests


def describe_validation(found: list[Evaluated], state: RunState) -> dict[str, Any]:
    """What result.json holds of the evaluation of the whole split.

    Of a pack whose models are not mixed, `losses` has each and `loss` is the mean of those that went on to the end.
    """
    losses = [each.loss if math.isfinite(each.loss) else None for each in found]
    living = [loss for model, loss in enumerate(losses) if loss is not None and str(model) not in state.stopped]
    loss = fmean(living or [loss for loss in losses if loss is not None])
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "tokens": found[0].targets,
        "seconds": sum(each.seconds for each in found),
        "split": "validation",
        "validation_complete": True,
        "losses": losses if len(found) > 1 else None,
    }


def failed_result(config: Config, state: RunState, reason: str) -> dict[str, Any]:
    """What result.json holds after an error ended the run."""
    fault = {"update": state.step + 1, "loss": None, "grad_norm": None, "where": reason}
    return {"status": "failed", "signal": None, "fault": fault, "validation": None, **_progress(config, state)}


def perplexity(loss: float) -> float | None:
    """Its exponential; None where a float cannot hold that."""
    return math.exp(loss) if loss < 700 else None


def _progress(config: Config, state: RunState) -> dict[str, Any]:
    return {
        "parameters": config.model.parameters,
        "tokens": state.step * config.targets_per_update,
        "step": state.step,
        "epochs": state.epochs,
        "loss": state.loss,
        "best": state.best,
        "models": config.packing.models,
        "bests": state.bests or None,
        "stopped": state.stopped or None,
        "consensus_distance": state.consensus_distance,
        "recipe_identity": config.recipe_identity,
        "sessions": state.sessions,
        "failed_checkpoints": state.failed_checkpoints,
        "training_seconds": state.training_seconds,
        "training_elapsed_seconds": state.elapsed_seconds,
        "all_start_seconds": state.start_seconds,
        "evaluation_seconds": state.evaluation_seconds,
        "checkpoint_seconds": state.checkpoint_seconds,
        "data_wait_seconds": state.data_wait_seconds,
    }


def _throughput(config: Config, state: RunState, device_name: str) -> dict[str, Any]:
    rate = state.training_targets / state.training_seconds if state.training_seconds else None
    flops = rate * flop_per_target(config.model) if rate else None
    peak = peak_flops(device_name, torch.bfloat16)
    return {
        "training_tokens_per_second": rate,
        "elapsed_tokens_per_second": state.step * config.targets_per_update / state.elapsed_seconds,
        "model_flops_per_second": flops,
        "model_flops_share_of_peak": flops / peak if flops and peak else None,
    }
