"""The process's settings under which equal runs on one machine give equal bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The values with which cuBLAS promises equal results on several streams (its documentation, Results
Reproducibility); PyTorch refuses matrix products under deterministic algorithms with any other."""


@contextmanager
def determinism(config: Config) -> Iterator[None]:
    """While entered, PyTorch takes deterministic algorithms alone, or not, as the execution asks; afterwards as before.

    An operator that has none then raises RuntimeError with its name. Enter it before CUDA starts: cuBLAS reads its
    variable once. Inductor follows PyTorch's setting, and chooses no kernel by its timing where the choice shows in the
    numbers; raises ConfigError where the compiler is too old to (torch 2.9).
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    wanted = config.execution.deterministic
    if wanted and config.execution.update != "eager":
        _check_compiler()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS_VARIABLE)
    if wanted and workspace not in _DETERMINISTIC_WORKSPACES:
        os.environ[CUBLAS_VARIABLE] = _DETERMINISTIC_WORKSPACES[0]
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(CUBLAS_VARIABLE, None)
        else:
            os.environ[CUBLAS_VARIABLE] = workspace


def _check_compiler() -> None:
    from torch._inductor import config as inductor  # takes a moment, which an eager run is spared

    if not hasattr(inductor, "deterministic"):
        raise ConfigError(
            f"execution.deterministic: the compiler of torch {torch.__version__} chooses kernels by their timing; "
            "set execution.update=eager or take a torch from 2.11 on"
        )
