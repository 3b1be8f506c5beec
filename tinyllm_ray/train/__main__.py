"""Train a recipe from start to end: `python -m tinyllm_ray.train --config nano --out runs/first`."""

import argparse
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm_ray.command import exit_status, run_command, say
from tinyllm_ray.errors import EXIT_DONE, ConfigError
from tinyllm_ray.train.convert import export_command, import_command
from tinyllm_ray.train.evaluate_command import evaluate_command
from tinyllm_ray.train.folder import begin_log, has_begun, leave_before_start, prepare_folder, read_result
from tinyllm_ray.train.interruption import Interruption
from tinyllm_ray.train.options import build_parser
from tinyllm_ray.train.stages import Stages, process_age_seconds

if TYPE_CHECKING:  # imported where they are used: signals are heard, and mistakes said, before PyTorch is there
    from tinyllm_ray.config import Config
    from tinyllm_ray.data.cache import TokenCache
    from tinyllm_ray.train.checkpoint import Checkpoint


def _report_command(arguments: list[str]) -> int:
    from tinyllm_ray.tune.page.run import report_command

    return report_command(arguments)


COMMANDS = {
    "evaluate": evaluate_command,
    "export": export_command,
    "import": import_command,
    "report": _report_command,
}


def main(arguments: list[str] | None = None, age_seconds: float = 0.0) -> int:
    """Run the command line and return its exit status; `age_seconds` is how long the process lives already."""
    stages = Stages(age_seconds)
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    if (status := run_command(COMMANDS, arguments, parser)) is not None:
        return status
    options = parser.parse_args(arguments)
    with Interruption(lambda number: leave_before_start(options.out, options.resume is not None, number)) as heard:
        return exit_status(lambda: _run(options, heard, stages))


def _run(options: argparse.Namespace, interruption: Interruption, stages: Stages) -> int:
    """From the request to the exit status."""
    from tinyllm_ray.train.collector import collector_at_rest
    from tinyllm_ray.train.compile_cache import keep_bytecode

    keep_bytecode()
    with collector_at_rest():
        begun = _begin(options, stages)
    if begun is None:
        return EXIT_DONE
    config, cache, checkpoint = begun

    from tinyllm_ray.train.recipe import describe_equal_runs, describe_passes
    from tinyllm_ray.train.run import Run
    from tinyllm_ray.train.short_of_memory import memory_named
    from tinyllm_ray.train.show import progress_line

    for line in (describe_passes(config, cache), describe_equal_runs(config)):
        if line is not None:
            say(line, sys.stderr)
    advice = (
        f"lower execution.micro_batch_size, {config.micro_batch_size} here, or the model's size, "
        "or try execution.recompute_activations=true"
    )
    with progress_line() as on_progress, memory_named(advice):
        status = Run(
            config,
            cache,
            options.out,
            checkpoint=checkpoint,
            stop_at=options.stop_at,
            on_progress=on_progress,
            interruption=interruption,
            stages=stages,
        ).execute()
    _say_end(options.out)
    return status


def _begin(options: argparse.Namespace, stages: Stages) -> "tuple[Config, TokenCache, Checkpoint | None] | None":
    """What to train, on what, and where to go on from; None where there is nothing left to train.

    Mistakes are found first, then what takes time is done side by side.
    """
    from tinyllm_ray.train.compile_cache import cache_variables, compile_cache_folder

    config = _configuration(options)
    helpers = ThreadPoolExecutor(2, "start")
    folder = helpers.submit(compile_cache_folder)  # asks nvidia-smi, beside torch's import

    from tinyllm_ray.data.cache import open_cache
    from tinyllm_ray.data.prepare import default_cache
    from tinyllm_ray.data.staged import staged_copy
    from tinyllm_ray.train.ahead import import_compiler, warm_device
    from tinyllm_ray.train.recipe import check_checkpoints, check_fits, check_validation
    from tinyllm_ray.train.run import Run  # noqa: F401 (PyTorch and all that a run needs belong to this stage)
    from tinyllm_ray.train.trainer import choose_device

    os.environ.update(cache_variables(folder.result()))  # read at the first compilation
    if options.decisions is not None:
        config = _decided(config, options)
    stages.end("imports")
    cache = staged_copy(open_cache(config.data.cache or default_cache()))
    check_fits(config, cache)
    check_validation(config, cache)
    check_checkpoints(config)
    device = choose_device(config)
    if _is_complete(options, config, cache):
        return None
    checkpoint = _checkpoint(options, config, cache)
    _take_folder(options, checkpoint)
    stages.end("cache_checks")
    warm = helpers.submit(warm_device, config, device)
    import_compiler(config)
    _use_compiled(config, Path(folder.result()))
    warm.result()
    stages.end("compiler_and_device")
    return config, cache, checkpoint


def _say_end(out: Path) -> None:
    result = read_result(out)
    how = f"{result['status']} after {result['step']} updates"
    if result["validation"]:
        how += f", validation loss {result['validation']['loss']:.4f}"
    for model, update in (result["stopped"] or {}).items():
        how += f"; model {model} stopped at update {update}, not finite"
    if result["fault"]:
        how += f": {result['fault']['where']}"
    say(f"{how}; {out / 'result.json'} holds the result, {out / 'metrics.jsonl'} the curve")


def _is_complete(options: argparse.Namespace, config: "Config", cache: "TokenCache") -> bool:
    """Whether there is nothing to go on with; says so."""
    from tinyllm_ray.train.recipe import run_updates

    result = read_result(options.out) if options.resume == "" else {}
    identities = (result.get("recipe_identity"), result.get("cache_identity"))
    complete = result.get("status") == "complete" and result.get("step", 0) >= run_updates(config)
    if not complete or identities != (config.recipe_identity, cache.identity):
        return False
    if config.output.checkpoint != "none" and not (options.out / f"checkpoints/step-{result['step']:08d}").exists():
        return False  # its last checkpoint could not be written: the one before it leads there again
    say(f"{options.out} is complete: {result['step']} updates, validation loss {result['validation']['loss']:.4f}")
    return True


def _take_folder(options: argparse.Namespace, checkpoint: "Checkpoint | None") -> None:
    prepare_folder(options.out, options.resume is not None)
    if checkpoint is not None:
        say(f"goes on from {checkpoint.path}", sys.stderr)
    elif options.resume is not None:
        say(f"{options.out} holds no checkpoint yet: the run begins from the start", sys.stderr)
    begin_log(options.out)


def _configuration(options: argparse.Namespace) -> "Config":
    from tinyllm_ray.config import load

    if options.stop_at is not None and options.stop_at < 1:
        raise ConfigError(f"--stop-at {options.stop_at}: must be at least 1")
    source = options.config
    if source is None:
        source = options.out / "config.yaml"
        if options.resume is None or not source.exists():
            raise ConfigError("--config is missing: a preset's name or a YAML file; see --help for examples")
    config = load(source, options.set)
    # As given they would mean other folders where the run is gone on with from elsewhere.
    if config.tuned is not None:
        promise = config.tuned.naming(lambda name: str(Path(source).absolute().parent / name))
        config = config.model_copy(update={"tuned": promise})
    if config.data.cache is not None:
        absolute = {"cache": str(Path(config.data.cache).absolute())}
        config = config.model_copy(update={"data": config.data.model_copy(update=absolute)})
    return config


def _use_compiled(config: "Config", folder: Path) -> None:
    """Start with what the study compiled, where the configuration is still the one it was compiled for."""
    promise = config.tuned
    if promise is None or promise.compiled is None or promise.workload != config.workload_identity:
        return
    from tinyllm_ray.measure.environment import source_identity
    from tinyllm_ray.train.compile_artifact import use_compiled

    line = use_compiled(promise.compiled, folder, source_identity().sha256)
    logging.getLogger(__name__).info("%s", line)
    say(line, sys.stderr)


def _decided(config: "Config", options: argparse.Namespace) -> "Config":
    """Under the execution that the decision file has for it on this device."""
    from tinyllm_ray.tune.decided import follow_decision

    return follow_decision(config, options.decisions, options.set, lambda line: say(line, sys.stderr))


def _checkpoint(options: argparse.Namespace, config: "Config", cache: "TokenCache") -> "Checkpoint | None":
    """Where the run goes on from; None at its start."""
    from tinyllm_ray.train.checkpoints import find_checkpoint
    from tinyllm_ray.train.same_recipe import refuse_other_recipe, refuse_other_run

    if options.resume is None:
        return None
    own = find_checkpoint(options.out) if any(options.out.glob("checkpoints/step-*")) else None
    named = find_checkpoint(Path(options.resume)) if options.resume else None
    if named and own and own.step > named.step and options.out.resolve() in named.path.resolve().parents:
        raise ConfigError(
            f"--resume {options.resume}: {options.out} holds a later checkpoint, of update {own.step}, which would "
            "stay the newest; give another --out, or remove the later ones"
        )
    # A job that comes back says the same again: what it made since is in its own folder.
    checkpoint = max((found for found in (own, named) if found), key=lambda found: found.step, default=None)
    if checkpoint is None:
        if has_begun(options.out):
            refuse_other_run(options.out, config, cache.identity)
        return None
    refuse_other_recipe(checkpoint, config, cache.identity)
    return checkpoint


if __name__ == "__main__":
    sys.exit(main(age_seconds=process_age_seconds()))
