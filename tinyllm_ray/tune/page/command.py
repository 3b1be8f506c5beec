"""`tune report`: a study's page again from its records, tables for other programs, two studies compared."""

import sys
from pathlib import Path

from tinyllm_ray.command import Parser, exit_status, say
from tinyllm_ray.errors import EXIT_DONE, ConfigError

_EPILOG = """examples:
  python -m tinyllm_ray.tune report studies/50m
      makes studies/50m/report.html again from trials.jsonl and summary.json
  python -m tinyllm_ray.tune report studies/50m --csv trials.csv --parquet trials.parquet
      the records as tables as well, a row a trial
  python -m tinyllm_ray.tune report studies/monday studies/today
      what the executions that both measured came to, and whether the difference is more than noise

The page is one file that needs no network and no scripts: send it, or open it on a phone. A running study rewrites its
own every few seconds.

exit status: 0 done; 1 damaged records, or a fault of the program; 2 a mistake in the request
"""


def report_parser() -> Parser:
    """The command line of `tune report`."""
    parser = Parser(
        "python -m tinyllm_ray.tune report", "A study's page and tables, or the comparison of two studies.", _EPILOG
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of a study")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="folder of a study to compare it with")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write the records as CSV")
    parser.add_argument("--parquet", metavar="FILE", type=Path, help="write the records as Parquet")
    return parser


def report_command(arguments: list[str]) -> int:
    """Run `report` with the arguments after its name; returns the exit status."""
    parser = report_parser()
    options = parser.parse_args(arguments)
    if options.other is not None:
        if options.csv or options.parquet:
            parser.error("--csv and --parquet are of one study")
        return exit_status(lambda: _compare(options.out, options.other))
    return exit_status(lambda: _report(options.out, options.csv, options.parquet))


def _report(out: Path, csv: Path | None, parquet: Path | None) -> int:
    from tinyllm_ray.tune.page.write import read_study, write_page
    from tinyllm_ray.tune.several_folder import PRESETS

    if (out / PRESETS).is_file():
        return _report_several(out, csv or parquet)
    records, _ = read_study(out)
    if csv is not None or parquet is not None:
        from tinyllm_ray.tune.page.export import write_csv, write_parquet

        for path, write in ((csv, write_csv), (parquet, write_parquet)):
            if path is not None:
                write(records, path)
                say(f"{path}: {len(records)} trials")
    try:
        page = write_page(out)
    except OSError as error:
        raise ConfigError(f"{out}: the page cannot be written there: {error.strerror}") from None
    say(f"{page}: {page.stat().st_size / 1000:.0f} kB")
    return EXIT_DONE


def _report_several(out: Path, table: Path | None) -> int:
    """The list of studies that share a budget, and each one's page."""
    from tinyllm_ray.tune.page.index import write_index
    from tinyllm_ray.tune.page.write import write_page
    from tinyllm_ray.tune.several_folder import begun_studies

    if table is not None:
        raise ConfigError(f"{out} holds several studies; name one of its folders for {table}")
    try:
        for page in [*map(write_page, begun_studies(out)), write_index(out)]:
            say(f"{page}: {page.stat().st_size / 1000:.0f} kB")
    except OSError as error:
        raise ConfigError(f"{out}: the pages cannot be written there: {error.strerror}") from None
    return EXIT_DONE


def _compare(out: Path, other: Path) -> int:
    from tinyllm_ray.tune.page.compare import compare, differences, table_lines
    from tinyllm_ray.tune.page.write import read_study

    first, second = (read_study(folder)[0] for folder in (out, other))
    found = compare(first, second)
    say(f"first: {out}, second: {other}; targets a second")
    for line in table_lines(found):
        say(line)
    for name, one, two in differences(first, second):
        say(f"{name} differs: {one}, {two}")
    if not differences(first, second):
        say("both on the same kind of device, with the same data, source and versions")
    say(f"{len(found)} executions in common; each interval is of its own, so one in twenty differs by chance")
    sys.stdout.flush()
    return EXIT_DONE
