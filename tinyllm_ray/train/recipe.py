"""How many updates a recipe takes, where its virtual epochs end, which learning rate each update has, on which tokens.

Pure functions of the configuration.
"""

import math
from fractions import Fraction

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.rows import count_rows
from tinyllm_ray.errors import ConfigError


def updates_after_epoch(config: Config, epoch: int) -> int:
    """Cumulative updates after virtual epoch `epoch` (1-based): floor(epoch x tokens an epoch / batch tokens + 1/2).

    Every update is a full batch, and rounding the cumulative count keeps the error below half an update for ever.
    """
    epoch_tokens = config.token_budget / config.training.epochs
    return math.floor(epoch * epoch_tokens / config.training.tokens_per_update + Fraction(1, 2))


def total_updates(config: Config) -> int:
    """Updates of the whole recipe, `training.max_updates` left aside; at least one."""
    return max(1, updates_after_epoch(config, config.training.epochs))


def run_updates(config: Config) -> int:
    """Updates this run makes: the recipe's, cut at `training.max_updates`."""
    limit = config.training.max_updates
    return total_updates(config) if limit is None else min(limit, total_updates(config))


def epoch_ends(config: Config) -> dict[int, int]:
    """Update count at which an epoch ends -> the epoch, the last of those that end together.

    The recipe's last update ends the last epoch, whatever the budget.
    """
    last = config.training.epochs
    ends = {updates: epoch for epoch in range(1, last + 1) if (updates := updates_after_epoch(config, epoch))}
    return ends | {total_updates(config): last}


def check_fits(config: Config, cache: TokenCache) -> None:
    """Raises ConfigError where the recipe cannot be trained on the tokens of `cache`."""
    if cache.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"data.cache: {cache.folder} holds ids up to {cache.vocab_size - 1}, model.vocab_size is "
            f"{config.model.vocab_size}; set model.vocab_size={cache.vocab_size} or take another cache"
        )
    rows = count_rows(cache.tokens("train"), config.model.context)
    if rows < config.rows_per_update:
        raise ConfigError(
            f"data.cache: {cache.folder} holds {rows} rows of model.context {config.model.context}, fewer than the "
            f"{config.rows_per_update} of an update; lower training.tokens_per_update or take a larger cache"
        )


def learning_rate(config: Config, update: int) -> float:
    """Learning rate of update `update` (0-based): linear warm-up to the peak, then a cosine to the final fraction.

    The cosine schedule of Loshchilov and Hutter (arXiv 1608.03983) without restarts; the last update of the recipe
    has exactly the final rate. Updates past the recipe keep that rate.
    """
    training, peak = config.training, config.optimizer.peak_learning_rate
    total = total_updates(config)
    warmup = training.warmup_fraction * total
    done = min(update + 1, total)
    if done <= warmup:
        return peak * done / warmup
    progress = (done - warmup) / (total - warmup)
    final = training.final_fraction
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
