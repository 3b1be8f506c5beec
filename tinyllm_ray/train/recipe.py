"""How many updates a recipe takes, where its virtual epochs end, which learning rate each update has, on which tokens.

Pure functions of the configuration.
"""

import math
from fractions import Fraction

from tinyllm_ray.config import Config, decimal
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.rows import count_rows
from tinyllm_ray.errors import ConfigError

_HALF = Fraction(1, 2)


def epoch_tokens(config: Config) -> Fraction:
    """Targets of a virtual epoch, exact."""
    ratio = config.training.epoch_tokens_per_parameter
    return config.token_budget / config.training.epochs if ratio is None else decimal(ratio) * config.model.parameters


def epochs(config: Config) -> int:
    """Virtual epochs of the whole recipe; the last may be shorter where their length is set by ratio."""
    return math.ceil(config.token_budget / epoch_tokens(config))


def updates_after_epoch(config: Config, epoch: int) -> int:
    """Cumulative updates after virtual epoch `epoch` (1-based): floor(epoch x tokens an epoch / batch tokens + 1/2).

    Every update is a full batch, and rounding the cumulative count keeps the error at half an update for ever. The
    last epoch ends with the budget, and nothing comes after it.
    """
    return _whole_updates(config, min(epoch * epoch_tokens(config), config.token_budget))


def total_updates(config: Config) -> int:
    """Updates of the whole recipe, `training.max_updates` left aside; at least one.

    >>> from tinyllm_ray.config import load
    >>> from tinyllm_ray.train.recipe import total_updates
    >>> total_updates(load("nano")), total_updates(load("20m"))
    (512, 3113)
    """
    return max(1, _whole_updates(config, config.token_budget))


def _whole_updates(config: Config, tokens: Fraction) -> int:
    return math.floor(tokens / config.training.tokens_per_update + _HALF)


def run_updates(config: Config) -> int:
    """Updates this run makes: the recipe's, cut at `training.max_updates`."""
    limit = config.training.max_updates
    return total_updates(config) if limit is None else min(limit, total_updates(config))


def epoch_ends(config: Config) -> dict[int, int]:
    """Update count at which an epoch ends -> the epoch, the last of those that end together.

    The recipe's last update ends the last epoch, whatever the budget. Epochs that end together are passed over in one
    step, so that a length of a few tokens by mistake takes no longer than one of an update.
    """
    last, total = epochs(config), total_updates(config)
    length = epoch_tokens(config) / config.training.tokens_per_update
    ends = {}
    epoch = math.ceil(_HALF / length)
    while epoch < last and (updates := updates_after_epoch(config, epoch)) < total:
        following = math.ceil((updates + _HALF) / length)  # the first epoch that ends later
        ends[updates] = following - 1
        epoch = following
    return ends | {total: last}


def check_fits(config: Config, cache: TokenCache) -> None:
    """Raises ConfigError where the recipe cannot be trained on the tokens of `cache`."""
    check_vocabulary(config, cache)
    rows = count_rows(cache.tokens("train"), config.model.context)
    if rows < config.rows_per_update:
        raise ConfigError(
            f"data.cache: {cache.folder} holds {rows} rows of model.context {config.model.context}, fewer than the "
            f"{config.rows_per_update} of an update; lower training.tokens_per_update or take a larger cache"
        )


def check_validation(config: Config, cache: TokenCache) -> None:
    """Raises ConfigError where `cache` has nothing that the recipe could be evaluated on."""
    if not count_rows(cache.tokens("validation"), config.model.context):
        raise ConfigError(
            f"data.cache: {cache.folder} holds {cache.tokens('validation')} validation tokens, not a row of "
            f"model.context {config.model.context} + 1; lower model.context or take a larger cache"
        )


def check_checkpoints(config: Config) -> None:
    """Raises ConfigError where a checkpoint is asked for that the recipe never comes to."""
    last, asked = total_updates(config), max(config.output.checkpoint_updates or (0,))
    if asked > last:
        raise ConfigError(
            f"output.checkpoint_updates: {asked} is beyond the recipe's last update, {last}; leave it out, or raise "
            "training.token_budget"
        )


def check_vocabulary(config: Config, cache: TokenCache) -> None:
    """Raises ConfigError where `cache` holds ids that the model has not."""
    if cache.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"data.cache: {cache.folder} holds ids up to {cache.vocab_size - 1}, model.vocab_size is "
            f"{config.model.vocab_size}; set model.vocab_size={cache.vocab_size} or take another cache"
        )


def solo_config(config: Config, worker: int) -> Config:
    """The configuration of the training alone that model `worker` of an unmixed pack equals.

    Raises ValueError where models are mixed, since no training alone equals theirs, and where there is no such model.
    """
    packing = config.packing
    if packing.mixed:
        raise ValueError(f"{packing.models} mixed models are one training; none of them equals a training alone")
    if not 0 <= worker < packing.models:
        raise ValueError(f"there is no model {worker} in a pack of {packing.models}")
    own = packing.each[worker].model_dump(mode="json", exclude_none=True)
    values = config.model_dump(mode="json", exclude={"packing"})
    values["training"]["seed"] = own.pop("seed", config.training.seed)
    values["optimizer"] |= own
    values["execution"]["packed_backward"] = None
    return Config.model_validate(values)


def learning_rate_sum(config: Config, updates: int) -> float:
    """What the learning rates of the first `updates` updates add up to; in a pack those of the largest peak."""
    peak = config.optimizer.peak_learning_rate
    own = [each.peak_learning_rate or peak for each in config.packing.each] if config.packing.models > 1 else []
    return max([peak, *own]) / peak * sum(learning_rate(config, update) for update in range(updates))


def describe_passes(config: Config, cache: TokenCache) -> str | None:
    """A line for people where the run needs more tokens than the cache has; None where it does not."""
    targets, tokens = run_updates(config) * config.training.tokens_per_update, cache.tokens("train")
    if targets < tokens:
        return None
    return (
        f"the run's {targets:,} targets pass {targets / tokens:.1f} times over the {tokens:,} training tokens of "
        f"{cache.folder}, each time in another order"
    )


def describe_equal_runs(config: Config) -> str | None:
    """A line for people where a pack trains the same run several times; None where it does not."""
    packing = config.packing
    if packing.mixed or len({own.model_dump_json() for own in packing.each}) == packing.models:
        return None
    return "packing.models: some of the models are equal runs; tell them apart by packing.variants, like {seed: 1}"


def learning_rate(config: Config, update: int) -> float:
    """Learning rate of update `update` (0-based): linear warm-up to the peak, then down to the final fraction of it.

    `cosine` falls along a half wave (Loshchilov and Hutter, arXiv 1608.03983, without restarts); `warmup-stable-decay`
    stays at the peak and falls linearly over the last updates (Hu et al., arXiv 2404.06395; linear decay as in Hägele
    et al., arXiv 2405.18392). The last update of the recipe has exactly the final rate, where warm-up leaves it one;
    updates past it keep that.

    >>> from tinyllm_ray.config import load
    >>> from tinyllm_ray.train.recipe import learning_rate
    >>> [round(learning_rate(load("nano"), update), 6) for update in (0, 25, 511)]
    [0.000156, 0.004, 0.0004]
    """
    training, peak = config.training, config.optimizer.peak_learning_rate
    total = total_updates(config)
    warmup = training.warmup_fraction * total
    done = min(update + 1, total)
    if done <= warmup:
        return peak * done / warmup
    if training.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * (done - warmup) / (total - warmup)))
    else:
        decay = training.decay_fraction * total
        height = min(1.0, (total - done) / decay) if decay else 1.0  # 0 / 0: the final rate is the peak
    return peak * (training.final_fraction + (1 - training.final_fraction) * height)
