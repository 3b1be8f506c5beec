"""The command line `evaluate`: the loss of weights, wherever they lie, on a split of a token cache."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm_ray.command import Parser, exit_status, say
from tinyllm_ray.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from tinyllm_ray.config import Config
    from tinyllm_ray.data.cache import TokenCache
    from tinyllm_ray.train.weights_source import WeightsSource

_EVALUATE_EPILOG = """examples:
  python -m tinyllm_ray.train evaluate runs/20m
      loss of the newest checkpoint on the whole validation split, as a JSON object on standard output
  python -m tinyllm_ray.train evaluate runs/20m/checkpoints/step-00001000 --subset
      of an earlier one, on the fixed subset that epoch evaluations use
  python -m tinyllm_ray.train evaluate model.safetensors --config 20m --set data.cache=caches/c4
      of a file of weights, which does not know its configuration, on other tokens

exit status: 0 evaluated; 1 a fault of the program; 2 a mistake in the request
"""


def evaluate_command(arguments: list[str]) -> int:
    """Run `evaluate` with what follows it on the command line and return the exit status."""
    options = evaluate_parser().parse_args(arguments)
    return exit_status(lambda: _evaluate(options))


def evaluate_parser() -> Parser:
    """The command line of `evaluate`."""
    parser = Parser("python -m tinyllm_ray.train evaluate", "Loss of a model's weights on a split.", _EVALUATE_EPILOG)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a run's folder (its newest checkpoint), a checkpoint's, one packed model's (.../workers/03), an imported "
        "folder, or a .safetensors file",
    )
    parser.add_argument("--config", help="a preset or YAML file, where the weights do not know theirs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--subset", action="store_true", help="the fixed subset of epoch evaluations only")
    parser.add_argument("--split", default="validation", help="split of the token cache (default: validation)")
    return parser


def _evaluate(options: argparse.Namespace) -> int:
    from tinyllm_ray.train.compile_cache import cache_variables, compile_cache_folder

    os.environ.update(cache_variables(compile_cache_folder()))  # before torch is imported

    from tinyllm_ray.data.cache import open_cache
    from tinyllm_ray.data.prepare import default_cache
    from tinyllm_ray.train.recipe import check_vocabulary
    from tinyllm_ray.train.result import perplexity
    from tinyllm_ray.train.short_of_memory import memory_named
    from tinyllm_ray.train.weights_source import open_weights

    source = open_weights(options.source)
    config = _configuration(source, options)
    cache = open_cache(config.data.cache or default_cache())
    cache.shards(options.split)
    check_vocabulary(config, cache)
    with memory_named("lower evaluation_execution.micro_batch_size, rows of a forward pass"):
        loss, targets, seconds = _loss(source.weights, config, cache, options)
    found = {
        "weights": str(source.weights),
        "step": source.step,
        "loss": loss if math.isfinite(loss) else None,
        "perplexity": perplexity(loss),
        "tokens": targets,
        "seconds": seconds,
        "tokens_per_second": targets / seconds,
        "split": options.split,
        "validation_complete": not options.subset,
        "cache_identity": cache.identity,
    }
    if source.cache_identity not in (None, cache.identity):
        say(f"{cache.folder} is another token cache than the one of the training", sys.stderr)
    say(json.dumps(found, indent=2, ensure_ascii=False))
    return EXIT_DONE


def _loss(
    weights: Path, config: "Config", cache: "TokenCache", options: argparse.Namespace
) -> tuple[float, int, float]:
    """The mean loss in nats, over how many targets, and the seconds that took."""
    import torch

    from tinyllm_ray.data.cache import Tokens
    from tinyllm_ray.data.loader import subset_batches, validation_batches
    from tinyllm_ray.model.llama import allocate
    from tinyllm_ray.train.evaluate import Evaluator
    from tinyllm_ray.train.trainer import choose_device, settle_threads
    from tinyllm_ray.train.weights import load_weights

    if not torch.cuda.is_available():
        config = _without_training(config)
    device = choose_device(config)
    torch.set_num_threads(settle_threads(config, device))
    model = allocate(config.model)
    load_weights(model, weights)
    evaluator = Evaluator(model.to(device), config, device)
    context, chosen = config.model.context, config.evaluation
    batches: Iterator[Tokens] = (
        subset_batches(cache, context, evaluator.rows, chosen.subset_blocks, chosen.subset_seed, split=options.split)
        if options.subset
        else validation_batches(cache, context, evaluator.rows, split=options.split)
    )
    began = time.perf_counter()
    loss, targets = evaluator.evaluate(batches)
    return loss, targets, time.perf_counter() - began


def _without_training(config: "Config") -> "Config":
    """Without what needs a GPU and an evaluation does not use: a run of a GPU's can be evaluated anywhere."""
    from tinyllm_ray.execution import ExecutionConfig, needs_gpu

    plain = ExecutionConfig()
    idle = [key for key, value in config.execution if needs_gpu(key, value) and key != "sdpa_backend"]
    return config.with_execution({key: getattr(plain, key) for key in idle})


def _configuration(source: "WeightsSource", options: argparse.Namespace) -> "Config":
    from tinyllm_ray.config import load, override

    whole = "training" in source.configuration
    if options.config is None and not whole:
        raise ConfigError(f"{options.source}: these weights know no whole configuration; name it with --config")
    if options.config is None:
        return override(source.configuration, source.origin, options.set)
    config = load(options.config, options.set)
    if source.configuration and config.model != source.model:
        raise ConfigError(f"--config {options.config}: its model is another than that of {source.origin}")
    return config
