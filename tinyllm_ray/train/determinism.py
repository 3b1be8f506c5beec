"""The process's settings under which equal runs on one machine give equal bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The values with which cuBLAS promises equal results on several streams (its documentation, Results
Reproducibility); PyTorch refuses matrix products under deterministic algorithms with any other."""


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """While entered, PyTorch takes deterministic algorithms alone, or not; afterwards all is as it was before.

    An operator that has none then raises RuntimeError with its name. Enter it before CUDA starts: cuBLAS reads its
    variable once. Inductor follows: it chooses no kernel by timing where the choice shows in the numbers.
    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
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
