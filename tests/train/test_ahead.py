"""Readying a device changes nothing of what is trained."""

import sys
from collections.abc import Callable

import pytest
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.train.ahead import import_compiler, warm_device

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("update", "module"),
    [
        ("eager", "torch._dynamo"),
        ("compiled", "torch._inductor.compile_fx"),
        ("graph", "torch._inductor.compile_fx"),
    ],
)
def test_what_the_first_update_would_import_is_there(tiny: MakeConfig, update: str, module: str) -> None:
    import_compiler(tiny(execution={"update": update}))
    assert module in sys.modules


def test_no_random_number_is_drawn_on_a_cpu(tiny: MakeConfig) -> None:
    before = torch.get_rng_state()
    warm_device(tiny(), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_no_random_number_is_drawn_on_a_gpu(tiny: MakeConfig) -> None:
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    warm_device(tiny(), torch.device("cuda", 0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
