"""Models in processes of their own on one GPU against the same models one by one in one process."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linux_processes import ends

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.train.packed_processes import ModelProcessError, Processes
from tinyllm_ray.train.trainer import Trainer

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.gpu

MIXED = {"models": 4, "topology": "one_peer_exponential", "scheme": "awc"}
APART = {"models": 4, "variants": [{"seed": seed} for seed in range(4)]}


def pack(tiny: MakeConfig, packing: dict[str, Any], **execution: Any) -> Config:
    rows = 16 if "topology" in packing else 4
    return tiny(
        model={"layers": 2, "width": 128, "heads": 2, "ffn": 256, "context": 16, "vocab_size": 61},
        optimizer={"peak_learning_rate": 0.001},
        training={"tokens_per_update": 16 * rows, "token_budget": 16 * rows * 20, "epochs": 2},
        packing=packing,
        execution={"micro_batch_size": 2, **execution},
    )


def children_of(trainer: Trainer) -> list[int]:
    (processes,) = [own for own in vars(trainer._trainee).values() if isinstance(own, Processes)]
    return [process.pid for process in processes._processes if process.pid is not None]


@pytest.mark.parametrize("update", ["eager", "compiled"])
@pytest.mark.parametrize("packing", [MIXED, APART], ids=["mixed", "apart"])
def test_they_train_as_one_by_one(
    tiny: MakeConfig, tiny_cache: TokenCache, packing: dict[str, Any], update: str
) -> None:
    """Twenty updates queued without a look at the device: what one side reads the other has finished writing.

    Code compiled in two processes rounds differently. In bfloat16 on a CPU, compiled against eager at this rate: losses
    up to 0.005 apart, norms 0.6%, weights 3% of how far they came, since AdamW goes by the signs of gradients that are
    next to nothing; yet along the way all of them went, 0.05%. There one update lost of twenty is 5%, the last, whose
    rate is next to nothing, 0.3%; losses are then 0.13 apart. (At ten times the rate rounding alone gives 0.13.)
    """
    config = pack(tiny, packing, update=update)
    found = []
    for way in ("processes", "one_by_one"):
        with Trainer(config.with_execution({"packed_backward": way}), tiny_cache) as trainer:
            begun = weights(trainer)
            losses, norms = torch.stack([torch.stack(trainer.step()) for _ in range(20)]).cpu().unbind(1)
            found.append((losses, norms, weights(trainer) - begun))
    (losses, norms, moved), expected = found
    torch.testing.assert_close(losses, expected[0], rtol=0, atol=0.02)
    torch.testing.assert_close(norms, expected[1], rtol=0.02, atol=0)
    assert float(moved @ expected[2] / (expected[2] @ expected[2])) == pytest.approx(1, abs=0.002)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([weight.detach().cpu().flatten() for weight in trainer.model.parameters()])


def test_memory_of_all_counts_and_a_killed_process_is_named(tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    with Trainer(pack(tiny, MIXED, packed_backward="processes"), tiny_cache) as trainer:
        trainer.step()
        own = torch.cuda.max_memory_allocated()
        peaks = trainer.peak_memory()
        assert peaks.peak_allocated_bytes is not None
        assert peaks.peak_allocated_bytes > own
        assert peaks.total_bytes == torch.cuda.get_device_properties(0).total_memory
        children = children_of(trainer)
        os.kill(children[2], signal.SIGKILL)
        with pytest.raises(ModelProcessError, match="model 2: its process was ended by SIGKILL"):
            trainer.step()
        assert all(map(ends, children))
        trainer.synchronize()
        assert all(weight.isfinite().all() for weight in trainer.model.parameters())
