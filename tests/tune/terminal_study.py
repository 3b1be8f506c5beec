"""A study that waits for its end after three played measurements: `terminal_study.py FOLDER ARGUMENT...`."""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from played_ray import RECIPE, SPACE, measured, note, play_ray

from tinyllm_ray.tune import __main__ as command


def run_trials(driver: Any, *_: Any) -> None:
    for number in range(3):
        request = driver.ask()
        driver.hear(request["candidate"], {"event": "stage", "stage": "start", "seconds": 0.001})
        driver.hear(request["candidate"], {"event": "record", "record": measured(request, random.Random(number))})
    driver.ask()
    note(kind="waiting", pid=os.getpid())
    while not driver.finished:
        time.sleep(0.01)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    Path("recipe.yaml").write_text(RECIPE)
    Path("space.yaml").write_text(SPACE)
    play_ray(run_trials)
    sys.exit(command.main(sys.argv[2:]))
