"""A log that cannot be written, as on a file system without room: its lines are lost, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from played_ray import RECIPE, SPACE
from rich.console import Console

from tinyllm_ray.command import note, say
from tinyllm_ray.tune import live

SESSION = """
import os, sys
from pathlib import Path
from played_ray import play_ray, run_session
play_ray()
os._exit(run_session(Path("."), sys.argv[1:]))
"""


def test_a_study_whose_log_cannot_be_written_ends_with_its_report(tmp_path: Path) -> None:
    (tmp_path / "said").symlink_to("/dev/full")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "space.yaml").write_text(SPACE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = ["--budget", "60s", "--config", "recipe.yaml", "--space", "space.yaml", "--out", "out"]
    done = subprocess.run([sys.executable, "-c", SESSION, *command], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["selected"] is not None


def test_a_line_of_a_log_is_lost_and_one_that_was_asked_for_is_a_fault() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it would write what is left)
    note("of a log", full)
    live.say(Console(file=full), "of a study")
    with pytest.raises(OSError, match="No space left"):
        say("asked for", full)
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    full.close()
