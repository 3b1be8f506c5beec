"""Summed cross-entropy, in both its forms, against its formula in float64."""

from collections.abc import Callable

import pytest
import torch

from tinyllm_ray.model.losses import (
    IGNORED,
    group_size,
    summed_cross_entropy,
    summed_cross_entropy_by_groups,
)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

both = pytest.mark.parametrize("loss", [summed_cross_entropy, summed_cross_entropy_by_groups])


def draw(rows: int, vocab_size: int, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    return logits, torch.randint(vocab_size, (rows,), generator=generator)


def formula(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Target by target, without a maximum: exp of a float64 reaches far."""
    terms = [row.exp().sum().log() - row[target] for row, target in zip(logits.double(), targets, strict=True)]
    return float(torch.stack(terms).sum())


@both
@pytest.mark.parametrize("vocab_size", [2, 61, 1000, 2000, 1031, 4099])  # the last two are primes: groups of one
def test_equals_the_formula_for_every_kind_of_vocabulary(loss: Loss, vocab_size: int) -> None:
    logits, targets = draw(7, vocab_size)
    assert loss(logits, targets).item() == pytest.approx(formula(logits, targets), rel=1e-12)
    assert loss(logits.float(), targets).item() == pytest.approx(formula(logits, targets), rel=1e-6)


@both
def test_ignored_targets_add_nothing_wherever_they_stand(loss: Loss) -> None:
    logits, targets = draw(9, 96)
    some = targets.clone()
    some[[0, 4, 8]] = IGNORED
    kept = some != IGNORED
    assert loss(logits, some).item() == pytest.approx(formula(logits[kept], targets[kept]), rel=1e-12)
    assert loss(logits, torch.full_like(targets, IGNORED)).item() == 0


@both
def test_bfloat16_logits_are_widened_before_anything_is_summed(loss: Loss) -> None:
    logits, targets = draw(5, 4000)
    narrow = logits.bfloat16()
    found = loss(narrow, targets)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(formula(narrow, targets), rel=1e-6)


@both
def test_large_logits_neither_overflow_nor_vanish(loss: Loss) -> None:
    logits, targets = draw(5, 2000)
    for shift in (1e4, -1e4):
        assert loss((logits + shift).float(), targets).item() == pytest.approx(formula(logits, targets), rel=1e-3)


def test_groups_fill_the_vocabulary_and_fit_into_registers() -> None:
    sizes = {vocab_size: group_size(vocab_size) for vocab_size in (32_000, 50_304, 128_256, 61, 4099)}
    assert sizes == {32_000: 1000, 50_304: 786, 128_256: 1002, 61: 61, 4099: 1}
