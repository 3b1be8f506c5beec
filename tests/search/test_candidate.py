"""The names of candidates: short enough for a terminal's line and a folder, and never the same for two executions."""

import itertools
from typing import Any

import pytest

from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.search.candidate import make_candidate

KERNELS = ("loss_kernel", "norm_kernel", "rotary_kernel", "activation_kernel", "optimizer_kernel")
GRAPH = {"micro_batch_size": 32, "update": "graph", "sdpa_backend": "cudnn", "cpu_threads": 8}


def settled(**execution: Any) -> dict[str, Any]:
    return ExecutionConfig.model_validate({**GRAPH, **execution}).model_dump(mode="json")


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ({}, ""),
        (dict.fromkeys(KERNELS, "triton"), " triton"),
        ({"norm_kernel": "triton", "loss_kernel": "triton"}, " triton:loss+norm"),
        ({"residual_dtype": "bfloat16"}, " bf16"),
        ({"prefetch_depth": 3, "loss_kernel": "triton"}, " triton:loss prefetch_depth=3"),
    ],
)
def test_what_differs_from_the_default_is_named_briefly(execution: dict[str, Any], words: str) -> None:
    made = make_candidate(7, settled(**execution))
    assert made.label == f"mb32 graph default cudnn t8{words}"
    assert made.id == f"c07-{made.label}".translate(str.maketrans(" :+=", "----"))


def test_every_combination_has_a_name_of_its_own() -> None:
    ways = itertools.product(("torch", "triton"), repeat=len(KERNELS))
    names = {make_candidate(1, settled(**dict(zip(KERNELS, way, strict=True)))).id for way in ways}
    assert len(names) == 2 ** len(KERNELS)
    assert max(map(len, names)) < 80
