"""Where a job's staged copies lie on its nodes, and what has a process use them.

    $SLURM_TMPDIR/stage-UID-JOB, else SCRATCH/trUID-JOB/stage:
        environment/   a virtual environment over the same interpreter, with all installed packages
        tokens/ID      the token cache that the command reads
        compiled/      what was compiled before, on machines like this one
        staged.json    which of them are whole

A checkout of this package is read where it lies: two hundred files beside ten thousands. Standard library only: the
launcher and every node's step import this module.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = "stage"
RECORD = "staged.json"
ENVIRONMENT, TOKENS, COMPILED = "environment", "tokens", "compiled"


def stage_folder(job_folder: Path, user: int, job: int, environment: Mapping[str, str] = os.environ) -> Path:
    """The job's staging folder on this node, whether it is there or not; `job_folder` is where all else of it lies."""
    own = environment.get("SLURM_TMPDIR", "")
    if own and os.access(own, os.W_OK | os.X_OK):
        return Path(own) / f"{NAME}-{user}-{job}"
    return job_folder / NAME


def whole(folder: Path) -> set[str]:
    """The parts that were unpacked and are what they should be; none where nothing is staged."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return {str(name) for name in record["whole"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def staged_python(folder: Path) -> str:
    """The interpreter to run with: the staged environment's, else this one."""
    return str(folder / ENVIRONMENT / "bin" / "python") if ENVIRONMENT in whole(folder) else sys.executable


def staged_variables(folder: Path) -> dict[str, str]:
    """Environment variables that have a process and its children use what is staged."""
    parts = whole(folder)
    variables = {}
    if TOKENS in parts:
        variables["TINYLLM_RAY_STAGED_TOKENS"] = str(folder / TOKENS)
    if COMPILED in parts:
        variables["TINYLLM_RAY_COMPILE_CACHE"] = str(folder / COMPILED)
    return variables
