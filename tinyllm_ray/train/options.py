"""The command line of a training: its options and its help."""

from pathlib import Path

from tinyllm_ray.command import Parser

_EPILOG = """commands beside training, each with its own --help:
  python -m tinyllm_ray.train evaluate RUN
      loss of a run's or checkpoint's weights on a split
  python -m tinyllm_ray.train export RUN
      a Hugging Face folder of them
  python -m tinyllm_ray.train import FOLDER
      a checkpoint of a Hugging Face folder
  python -m tinyllm_ray.train report RUN
      a page of a run's curves, throughput and start

examples:
  python -m tinyllm_ray.train --config nano --out runs/first
      two CPU cores train the smallest preset in minutes
  python -m tinyllm_ray.train --config OUT/selected.yaml --out runs/tuned
      the recipe under the execution that the tuner selected, started with what the study compiled; kernels, throughput
      and seconds are compared with what it promised, and result.json has both
  python -m tinyllm_ray.train --config 50m --decisions studies/all/decisions.yaml --out runs/50m
      a preset under the execution that was found for its shape on this kind of device
  python -m tinyllm_ray.train --config 20m --set training.max_updates=100 --out runs/short
      a preset with settings changed
  python -m tinyllm_ray.train --config 20m --set output.checkpoint=interval --set output.checkpoint_interval=500 \\
      --out runs/20m --resume
      starts where there is nothing yet, goes on where there is: one command for a job that comes back

SIGINT, SIGTERM, SIGUSR1 and SIGHUP end a run after the update in flight, with a checkpoint (unless output.checkpoint
is none) and status interrupted; before the first update, and when sent again a second later, at once.

exit status: 0 trained to the end, or to --stop-at; 1 a fault of the program; 2 a mistake in the request; 3 the loss or
a gradient went non-finite; 130 ended by SIGINT; 143 ended by SIGTERM, SIGUSR1 or SIGHUP
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        "python -m tinyllm_ray.train",
        "Train a recipe; metrics, checkpoints and a result appear in the folder --out.",
        _EPILOG,
    )
    parser.add_argument(
        "--config", help="a preset's name or a YAML file, such as OUT/selected.yaml; with --resume OUT/config.yaml"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be given several times"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the run; must be new or empty, or --resume")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="go on from the newest checkpoint of --out, from the start where there is none; or from the run's or "
        "checkpoint's folder named here. The recipe has to be the same; execution, device and output may differ",
    )
    parser.add_argument(
        "--decisions",
        metavar="FILE",
        help="train under the execution that this decision file of the tuner has for the recipe's shape, this device "
        "and these versions; says so where it has none, and keeps the configuration's own",
    )
    parser.add_argument(
        "--stop-at", type=int, metavar="UPDATE", help="end after this update as a signal would, with exit status 0"
    )
    return parser
