"""What people call a trial, and where Ray's dashboard shows it."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import ray._raylet

from tinyllm_ray.config import load, preset_names
from tinyllm_ray.sections import ModelConfig


def trial_name(model: Mapping[str, Any], label: str) -> str:
    """The size of a configuration's `model` and the label of its execution, like `20m mb32 graph cudnn t8`."""
    size = _size(json.dumps(model, sort_keys=True))
    return f"{size} {label}".replace("/", "-")  # a Tune trial's name may hold no separator of paths


def show_process_as(name: str) -> None:
    """Set this Ray worker's title, which the dashboard lists among its node's processes, until Ray sets it again."""
    # Ray's own setproctitle, which it calls before and after every task; it is not public, and may go.
    set_title = getattr(ray._raylet, "setproctitle", None)
    if set_title is not None:
        set_title(f"ray::{name}")


@functools.cache
def _size(model: str) -> str:
    """The preset with that model, else its parameters, like `20.4M`."""
    config = ModelConfig.model_validate(json.loads(model))
    alike = (name for name in preset_names() if load(name).model == config)
    # The shortest is the plain size: 20m, not packed8-20m-awc.
    return min(alike, key=len, default=f"{config.parameters / 1e6:.1f}M")
