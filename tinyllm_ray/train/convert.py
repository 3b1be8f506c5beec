"""The command lines `export` and `import`: their options and texts; what they do is imported when they do it."""

from pathlib import Path

from tinyllm_ray.command import Parser, exit_status, say
from tinyllm_ray.errors import EXIT_DONE

_EXPORT_EPILOG = """examples:
  python -m tinyllm_ray.train export runs/20m --out exported/20m
      LlamaForCausalLM.from_pretrained("exported/20m") and AutoTokenizer.from_pretrained("exported/20m") open it
  python -m tinyllm_ray.train export runs/20m --cache caches/books --out exported/20m
      the same on a machine where the token cache lies elsewhere

exit status: 0 exported; 1 a fault of the program; 2 a mistake in the request
"""
_IMPORT_EPILOG = """examples:
  python -m tinyllm_ray.train import exported/20m --out imported/20m
      weights under this package's names, and the section `model` of a configuration that fits them

exit status: 0 imported; 1 a fault of the program; 2 a mistake in the request, or a model that this one cannot represent
"""


def export_command(arguments: list[str]) -> int:
    """Run `export` with what follows it on the command line and return the exit status."""
    options = export_parser().parse_args(arguments)

    def run() -> int:
        from tinyllm_ray.train.export import export_run

        return _say(export_run(options.source, options.out, cache=options.cache))

    return exit_status(run)


def import_command(arguments: list[str]) -> int:
    """Run `import` with what follows it on the command line and return the exit status."""
    options = import_parser().parse_args(arguments)

    def run() -> int:
        from tinyllm_ray.train.import_folder import import_folder

        return _say(import_folder(options.folder, options.out))

    return exit_status(run)


def export_parser() -> Parser:
    """The command line of `export`."""
    parser = Parser(
        "python -m tinyllm_ray.train export",
        "Write a trained model and its tokenizer as a folder that Hugging Face's transformers opens.",
        _EXPORT_EPILOG,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a run's folder (its newest checkpoint), a checkpoint's, one packed model's (.../workers/03), or an "
        "imported folder",
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--cache", type=Path, help="the token cache, where it was moved")
    return parser


def import_parser() -> Parser:
    """The command line of `import`."""
    parser = Parser(
        "python -m tinyllm_ray.train import",
        "Read a Llama of Hugging Face's transformers (config.json and safetensors) as this package's model.",
        _IMPORT_EPILOG,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder that save_pretrained or export wrote")
    parser.add_argument("--out", required=True, type=Path, help="folder to write; must be new or empty")
    return parser


def _say(lines: list[str]) -> int:
    say("\n".join(lines))
    return EXIT_DONE
