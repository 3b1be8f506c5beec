"""What is said of an update that went non-finite."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from poison import HARMED, Poisoned, poison

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.diagnosis import explain_fault
from tinyllm_ray.train.trainer import Trainer

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")


@pytest.fixture
def trainer(tiny: MakeConfig, tiny_cache: TokenCache) -> Iterator[Trainer]:
    with Trainer(tiny(), tiny_cache) as trainer:
        yield trainer


@pytest.fixture
def poisoned(tiny: MakeConfig, tiny_cache: TokenCache) -> Iterator[Callable[..., Trainer]]:
    """`poisoned("loss nan", 3, 7)`: a trainer whose update after 3 updates is harmed by its row 7."""
    with ExitStack() as stack:

        def make(harm: str, update: int, row: int = 7) -> Trainer:
            config = tiny()
            with RowLoader(tiny_cache, context=16, seed=config.training.seed) as loader:
                rows = [loader.next(8) for _ in range(update + 1)][-1]
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                "tinyllm_ray.train.trainer.initialize",
                lambda *arguments: poison(
                    initialize(*arguments), harm, torch.from_numpy(rows[row, :-1].astype("int64"))
                ),
            )
            return stack.enter_context(Trainer(config, tiny_cache))

        yield make


def step_until_stopped(trainer: Trainer, update: int) -> None:
    """Until five updates after the one at fault, as a run goes on before it reads."""
    finite = [math.isfinite(sum(said)) for said in (trainer.step() for _ in range(update + 6))]
    assert finite == [number < update for number in range(update + 6)]


@pytest.mark.parametrize("update", [0, 3, 40])
@pytest.mark.parametrize(("row", "number"), [(0, 1), (7, 2)])
def test_names_the_micro_batch_and_its_loss(
    poisoned: Callable[..., Trainer], tiny_cache: TokenCache, update: int, row: int, number: int
) -> None:
    trainer = poisoned("loss nan", update, row)
    step_until_stopped(trainer, update)
    line = explain_fault(trainer, tiny_cache, update)
    assert line == f"update {update + 1}: micro-batch {number} of 2: loss nan, with finite logits"


def test_names_the_part_of_the_forward_pass(trainer: Trainer, tiny_cache: TokenCache) -> None:
    with torch.no_grad():
        trainer.model.blocks[1].ffn.gate_up.weight.fill_(1e38)  # type: ignore[union-attr,operator]
    step_until_stopped(trainer, 0)
    line = explain_fault(trainer, tiny_cache, 0)
    assert line == "update 1: micro-batch 1 of 2: loss nan, first not finite in the output of blocks.1.ffn.gate_up"


def test_names_the_head(trainer: Trainer, tiny_cache: TokenCache) -> None:
    """States of 1e38 are finite, and so is the embedding; their products are not."""
    with torch.no_grad():
        trainer.model.norm.weight.fill_(1e38)
        trainer.model.embedding.weight.mul_(1e3)
    step_until_stopped(trainer, 0)
    line = explain_fault(trainer, tiny_cache, 0)
    assert line.startswith("update 1: micro-batch 1 of 2: loss ")
    assert line.endswith(", first not finite in the output of the head")


def test_names_the_gradient(poisoned: Callable[..., Trainer], tiny_cache: TokenCache) -> None:
    trainer = poisoned("gradient inf", 2)
    step_until_stopped(trainer, 2)
    line = explain_fault(trainer, tiny_cache, 2)
    assert line.startswith("update 3: micro-batch 2 of 2: loss 4.")
    assert line.endswith(f"gradients of 1 of 14 weights not finite, {HARMED} the first that backward reaches")


def test_names_the_gradient_nearest_the_loss(trainer: Trainer, tiny_cache: TokenCache) -> None:
    """What is behind it in the backward pass is broken by it."""
    trainer.model.blocks[1].attention.register_full_backward_hook(  # type: ignore[union-attr]
        lambda module, inputs, outputs: (inputs[0] * math.inf, *inputs[1:])
    )
    step_until_stopped(trainer, 0)
    line = explain_fault(trainer, tiny_cache, 0)
    assert "blocks.1.attention_norm.weight the first that backward reaches" in line


def test_tells_a_norm_that_overflows_from_gradients_that_do(
    poisoned: Callable[..., Trainer], tiny_cache: TokenCache
) -> None:
    trainer = poisoned("squares inf", 2)
    step_until_stopped(trainer, 2)
    line = explain_fault(trainer, tiny_cache, 2)
    assert line == "update 3: every micro-batch is finite, the gradient norm is not (largest gradient 5e+24)"


def test_names_weights_that_were_broken_before(trainer: Trainer, tiny_cache: TokenCache) -> None:
    with torch.no_grad():
        trainer.model.norm.weight[3] = math.inf
        trainer.model.blocks[0].attention.out.weight[0, 0] = math.nan  # type: ignore[union-attr,index]
    step_until_stopped(trainer, 0)
    line = explain_fault(trainer, tiny_cache, 0)
    assert line == "update 1: its weights are not finite before it: blocks.0.attention.out.weight, norm.weight"


def test_says_where_only_the_execution_is_at_fault(poisoned: Callable[..., Trainer], tiny_cache: TokenCache) -> None:
    trainer = poisoned("loss nan", 1)
    step_until_stopped(trainer, 1)
    assert isinstance(trainer.model, Poisoned)
    trainer.model.harm = "none"
    line = explain_fault(trainer, tiny_cache, 1)
    assert line.startswith("update 2: finite when done again eagerly (loss 4.")
    assert "the fault was the execution's (micro_batch_size 4, update eager, sdpa_backend auto" in line


def test_serves_the_synthetic_batch(tiny: MakeConfig) -> None:
    with Trainer(tiny(), None) as trainer:
        with torch.no_grad():
            trainer.model.embedding.weight[trainer.feed.next()[5, 2]] = 1e38
        step_until_stopped(trainer, 0)
        assert explain_fault(trainer, None, 0).startswith("update 1: micro-batch 1 of 2: loss ")


def test_changes_nothing_and_raises_nothing(
    poisoned: Callable[..., Trainer], tiny_cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = poisoned("gradient inf", 0)
    step_until_stopped(trainer, 0)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    explain_fault(trainer, tiny_cache, 0)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert all(weight.grad is None for weight in trainer.model.parameters())
    assert not any(module._forward_hooks for module in trainer.model.modules())

    def fail(model: Poisoned, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory\nand more lines")

    monkeypatch.setattr(Poisoned, "loss", fail)
    line = explain_fault(trainer, tiny_cache, 0)
    assert line == "update 1: could not be done again eagerly: OutOfMemoryError: no memory"
