"""What the package offers on the command line: `python -m tinyllm_ray`."""

import sys

from tinyllm_ray.command import Parser, say
from tinyllm_ray.errors import EXIT_DONE

COMMANDS = {
    "tune": "find the fastest way to run a recipe",
    "train": "train a recipe; evaluate, export and import",
    "data": "make, check and describe token caches",
    "cluster": "submit and watch jobs on Slurm, check a machine",
}
"""By the name of the module that is run."""


def main(arguments: list[str] | None = None) -> int:
    """Print the commands, or end with a mistake's status where anything but `--help` is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] not in ("-h", "--help"):
        names = ", .".join(COMMANDS)
        Parser("python -m tinyllm_ray", "", "").error(
            f"{arguments[0]!r} is no command here; there is python -m tinyllm_ray.{names}"
        )
    say("commands, each with its own --help:")
    for name, what in COMMANDS.items():
        say(f"  {f'python -m tinyllm_ray.{name}':<30} {what}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
