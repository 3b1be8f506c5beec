"""Train a recipe from start to end: `python -m tinyllm_ray.train --config nano --out runs/first`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from tinyllm_ray.command import Parser, exit_status
from tinyllm_ray.errors import EXIT_DONE

_EPILOG = """examples:
  python -m tinyllm_ray.train --config nano --out runs/first
      two CPU cores train the smallest preset in minutes
  python -m tinyllm_ray.train --config OUT/selected.yaml --out runs/tuned
      the recipe under the execution that the tuner selected
  python -m tinyllm_ray.train --config 20m --set training.max_updates=100 --out runs/short
      a preset with settings changed

exit status: 0 trained to the end; 1 a fault of the program; 2 a mistake in the request; 3 the loss went non-finite;
130 and 143 ended by SIGINT and SIGTERM, after the update in flight
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    return exit_status(lambda: _run(options))


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        "python -m tinyllm_ray.train",
        "Train a recipe; metrics, weights and a result appear in the folder --out.",
        _EPILOG,
    )
    parser.add_argument("--config", required=True, help="a preset's name or a YAML file, such as OUT/selected.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be given several times"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the run; must be new or empty")
    return parser


def _run(options: argparse.Namespace) -> int:
    from tinyllm_ray.config import load

    config = load(options.config, options.set)

    from tinyllm_ray.train.compile_cache import cache_variables, compile_cache_folder

    os.environ.update(cache_variables(compile_cache_folder()))  # before torch is imported

    from tinyllm_ray.data.cache import open_cache
    from tinyllm_ray.data.prepare import default_cache
    from tinyllm_ray.train.recipe import check_fits
    from tinyllm_ray.train.run import Run, describe_passes, prepare_folder
    from tinyllm_ray.train.show import progress_line
    from tinyllm_ray.train.trainer import choose_device

    cache = open_cache(config.data.cache or default_cache())
    check_fits(config, cache)
    choose_device(config)
    prepare_folder(options.out)
    logging.basicConfig(
        filename=options.out / "train.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if passes := describe_passes(config, cache):
        print(passes, file=sys.stderr)
    with progress_line() as on_progress:
        status = Run(config, cache, options.out, on_progress).execute()
    how = "" if status == EXIT_DONE else f"ended early (exit status {status}): "
    print(f"{how}{options.out / 'result.json'} holds the result, {options.out / 'metrics.jsonl'} the curve")
    return status


if __name__ == "__main__":
    sys.exit(main())
