"""GPUs of several models on one cluster: figures of one say nothing of another, so that trials are held to one.

Ray names a node's model by a part of what the driver calls the device: `H200` of `NVIDIA H200`, `RTX-PRO-6000` of
`NVIDIA RTX PRO 6000 Blackwell Server Edition`.
"""

import re
from collections.abc import Sequence

from tinyllm_ray.errors import ConfigError


def refuse_mixture(models: Sequence[str], remedy: str) -> None:
    """Raise ConfigError where there are several; `remedy` is said with the first of them for `{}`."""
    if len(models) > 1:
        raise ConfigError(
            f"the cluster's GPUs are of several kinds ({', '.join(models)}), which no study mixes; "
            f"{remedy.format(models[0])}"
        )


def model_called(device: str, models: Sequence[str]) -> str | None:
    """The model, among Ray's names, of a device by its driver's name; None where it is of none of them."""
    found = [model for model in models if f" {_words(model)} " in f" {_words(device)} "]
    return max(found, key=len, default=None)


def _words(name: str) -> str:
    return " ".join(re.findall(r"[A-Za-z0-9]+", name)).casefold()
