"""Running the flat optimizer's kernels in tests: on a GPU as they are, elsewhere through Triton's interpreter."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

tl = pytest.importorskip("triton.language")

from tinyllm_ray.train import flat_kernel, packed_kernel  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def runnable() -> Iterator[None]:
    """Inside, the kernels run here.

    Triton decides where a kernel is defined whether it is compiled, so the modules are loaded once more; and its own
    `tl.sum` was defined when Triton was imported, so that NumPy's stands in for it.
    """
    if DEVICE.type == "cuda":
        yield
        return

    def plain_sum(x: Any, axis: int) -> Any:
        return tl.reduce(x, axis, tl.standard._sum_combine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(tl, "sum", plain_sum)
        importlib.reload(packed_kernel)
        importlib.reload(flat_kernel)
        yield
    importlib.reload(packed_kernel)
    importlib.reload(flat_kernel)
