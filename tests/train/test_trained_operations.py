"""The operations of an execution reach the trained models, and the evaluated ones are without them."""

from typing import Any

import pytest
import torch
from triton_kernels import runnable

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.operations import TORCH, operations_of
from tinyllm_ray.train.trainer import Trainer

MIXED = {"models": 2, "topology": "complete", "scheme": "atc"}


@pytest.mark.parametrize("packing", [{}, {"models": 2}, MIXED], ids=str)
def test_models_train_with_them_and_are_evaluated_without(tiny: Any, packing: dict[str, Any]) -> None:
    config = tiny(execution={"recompute_activations": True}, packing=packing)
    with Trainer(config, None) as trainer:
        assert trainer.model.operations == operations_of(config.execution) != TORCH
        trainer.step()
        evaluated = trainer.evaluation_models()
        assert {model.operations for model in evaluated} == {TORCH}
        trainer.step()
        assert all(one is other for one, other in zip(evaluated, trainer.evaluation_models(), strict=True))
        if not packing:
            for own, trained in zip(evaluated[0].parameters(), trainer.model.parameters(), strict=True):
                assert torch.equal(own, trained)


def test_a_training_with_every_kernel_of_the_decoder_learns_the_same(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"norm_kernel": "triton", "rotary_kernel": "triton", "activation_kernel": "triton"}
    model = {"layers": 1, "width": 8, "heads": 2, "ffn": 6, "context": 8}
    losses = []
    with runnable("norm_pieces", "norm", "rotary", "activation"):
        for execution in (kernels, {}):
            config = tiny(
                model=model, training={"tokens_per_update": 16}, execution=execution | {"micro_batch_size": 2}
            )
            with Trainer(config, None) as trainer:
                losses.append([trainer.step().loss.item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if torch.cuda.is_available() else 1e-6)
    assert losses[0][2] < losses[0][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_cpu_refuses_a_bfloat16_stream(tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"residual_dtype: 'bfloat16' \(a CPU has float32\) needs a GPU"):
        Trainer(tiny(execution={"residual_dtype": "bfloat16"}), None)
