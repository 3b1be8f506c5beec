"""Reading what a run left, for the tests of runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.checkpoints import find_checkpoint


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path} holds {name}"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines; of one that is being written a reader may see its part up to a page's end."""
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return lines_of(out / "metrics.jsonl")


def weights_of(out: Path, config: Config) -> Llama:
    """The model of the run's newest checkpoint."""
    model = initialize(config.model, seed=0)
    find_checkpoint(out).load_weights(model)
    return model


def learned(out: Path) -> dict[str, Any]:
    """Everything that the recipe decides, with every bit of it."""
    result = read_json(out / "result.json")
    return {
        "weights": (find_checkpoint(out).path / "model.safetensors").read_bytes(),
        "metrics": [[line[key] for key in ("step", "tokens", "loss", "lr", "grad_norm")] for line in metrics_of(out)],
        "evaluations": [
            [line[key] for key in ("step", "epoch", "split", "loss", "targets")]
            for line in lines_of(out / "evaluations.jsonl")
        ],
        "best": read_json(out / "best.json"),
        "result": [result[key] for key in ("status", "step", "epochs", "tokens", "best", "loss")],
        "validation": result["validation"]["loss"],
    }
