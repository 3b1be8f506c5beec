"""The command line of a study: its options and its help.

Standard library only, as the budget counts from the process's start.
"""

from pathlib import Path

from tinyllm_ray.command import Parser

_EPILOG = """commands beside studying, each with its own --help:
  python -m tinyllm_ray.tune report OUT
      a study's page again, CSV and Parquet; with two studies, their comparison
  python -m tinyllm_ray.tune rerun OUT c03
      one candidate of a study measured again
  python -m tinyllm_ray.tune validate OUT/selected.yaml
      whether the decision still holds on this machine and these versions

examples:
  python -m tinyllm_ray.tune --budget 45m
      a GPU machine studies the 20m preset; a machine without one studies nano over a small space
  python -m tinyllm_ray.tune --budget 10m --preset 50m --space execution --out studies/50m
  python -m tinyllm_ray.tune --budget 10m --config mine.yaml --set training.tokens_per_update=65536
  python -m tinyllm_ray.tune --budget 45m --out studies/50m --resume
      go on with a study that was ended, within what is left of its budget; begin it where there is none yet
  python -m tinyllm_ray.tune --budget 2h --presets 20m,50m,90m --out studies/all
      a study each within one budget; studies/all/decisions.yaml says what to train each shape with

OUT holds report.html (the study for people), selected.yaml (the configuration to train with), summary.json,
trials.jsonl (a record a line) and candidates/ (a configuration and a log each).

exit status: 0 a configuration was selected; 1 a fault of the program; 2 a mistake in the request; 3 nothing was
measured that can be believed; 130 and 143 ended by SIGINT and SIGTERM
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        "python -m tinyllm_ray.tune",
        "Find the fastest execution of a training recipe; everything ends within the budget.",
        _EPILOG,
    )
    parser.add_argument(
        "--budget", required=True, metavar="DURATION", help="wall clock for everything, like 90s or 1h30m"
    )
    recipe = parser.add_mutually_exclusive_group()
    recipe.add_argument(
        "--preset",
        help="recipe by name: nano, 20m, 20m-32k, packed-20m-adaptive, packed4-20m-atc, packed4-20m-awc, "
        "packed8-20m-awc, 50m, 90m, 250m, 500m (default: what fits the machine)",
    )
    recipe.add_argument("--config", metavar="FILE", help="recipe from a YAML file")
    recipe.add_argument(
        "--presets",
        metavar="NAME,NAME",
        help="several recipes, which share the budget and learn from each other; a folder each in --out",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be given several times"
    )
    parser.add_argument(
        "--space", help="what may vary: execution, packed, smoke, or a YAML file (default: what fits the machine)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=100,
        metavar="N",
        help="trainings planned with the answer; the search ends when it costs more than they save (default: 100)",
    )
    parser.add_argument(
        "--objective",
        choices=("training", "throughput"),
        default="training",
        help="least seconds for the planned trainings, starts included, or most targets a second (default: training)",
    )
    parser.add_argument("--out", type=Path, help="folder of the study (default: studies/ and the time)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the study in --out; begin it where there is none"
    )
    parser.add_argument(
        "--decisions", metavar="FILE", help="add the answer to this decision file, for `train --decisions FILE`"
    )
    parser.add_argument("--address", help="Ray cluster to join (default: $RAY_ADDRESS, else a local one is started)")
    parser.add_argument("--by-device", metavar="KIND", help="study GPUs of this kind, on a cluster that has several")
    parser.add_argument(
        "--retry", default="", metavar="FATES", help="with --resume: measure those again as well, like failed,invalid"
    )
    protocol = parser.add_argument_group("measurement (default: what the space says)")
    protocol.add_argument("--data-mode", choices=("real", "synthetic"), help="tokens through the loader, or one batch")
    protocol.add_argument("--warmup-updates", type=int, metavar="N", help="updates before the first window")
    protocol.add_argument("--windows", type=int, metavar="N", help="timed windows a candidate")
    protocol.add_argument("--updates-per-window", type=int, metavar="N")
    protocol.add_argument(
        "--search-windows",
        choices=("by_need", "by_count"),
        help="by_need: stop what cannot win, and time what the search tries no longer than need be; "
        "by_count: time it like baseline and finalists",
    )
    return parser
