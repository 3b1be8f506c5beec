"""Makes the page of a training run: `train report RUN` writes RUN/report.html from what the run recorded."""

import json
from pathlib import Path
from typing import Any, Final

from tinyllm_ray import journal
from tinyllm_ray.command import Parser, exit_status, say
from tinyllm_ray.errors import EXIT_DONE, ConfigError, TinyllmRayError
from tinyllm_ray.tune.page.maker import PAGE

_EPILOG = """examples:
  python -m tinyllm_ray.train report runs/20m
      makes runs/20m/report.html: curves, throughput, the start's stages, environment; of a run that goes on as well

exit status: 0 done; 1 damaged records, or a fault of the program; 2 a mistake in the request
"""

_FIGURES: Final = (
    "validation",
    "step",
    "tokens",
    "training_tokens_per_second",
    "training_seconds",
    "elapsed_tokens_per_second",
    "training_elapsed_seconds",
    "evaluation_seconds",
    "checkpoint_seconds",
    "entry_to_first_update_seconds",
)
"""Of result.json, None where a run has not come to them."""


def report_parser() -> Parser:
    """The command line of `train report`."""
    parser = Parser("python -m tinyllm_ray.train report", "A run's page, from what it recorded.", _EPILOG)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    return parser


def report_command(arguments: list[str]) -> int:
    """Run `report` with the arguments after its name; returns the exit status."""
    options = report_parser().parse_args(arguments)
    return exit_status(lambda: _report(options.run))


def _report(run: Path) -> int:
    try:
        page = write_run_page(run)
    except OSError as error:
        raise ConfigError(f"{run}: the page cannot be made there: {error.strerror}") from None
    say(f"{page}: {page.stat().st_size / 1000:.0f} kB")
    return EXIT_DONE


def write_run_page(run: Path) -> Path:
    """Make RUN/report.html again; returns its path.

    Raises ConfigError where `run` holds no run, TinyllmRayError where its records are damaged, OSError.
    """
    from tinyllm_ray.tune.page.run_charts import curve_chart, start_chart
    from tinyllm_ray.tune.page.run_data import CURVES, run_data
    from tinyllm_ray.tune.page.svg import drawing_settings
    from tinyllm_ray.tune.page.template import render

    if not (run / "result.json").is_file():
        raise ConfigError(f"{run}: there is no run here (result.json is missing)")
    result = dict.fromkeys(_FIGURES) | _read(run / "result.json")
    metrics, evaluations = (journal.read_lines(run / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    page = run_data(result, metrics, evaluations, _read(run / "environment.json"))
    with drawing_settings():
        curves = [chart for name in CURVES if (chart := curve_chart(page, name))]
        charts = {"curves": curves, "start": start_chart(page)}
    going = page.status == "running"
    html = render("run.html", heading=f"Run: {page.title}", page=page, charts=charts, refresh=going)
    path = run / PAGE
    journal.write_atomically(path, html.encode(errors="replace"))
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TinyllmRayError(f"{path} is damaged: {error}") from None
    return values if isinstance(values, dict) else {}
