"""Losses and gradients are compared exactly, and a start that lies is told from one that rounds otherwise."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from liars import LIES, Lie, Run, batches, lying, small_config

from tinyllm_ray.measure.parity import (
    BFLOAT16,
    FLOAT32,
    Comparison,
    Side,
    Tolerance,
    Visit,
    compare,
    of_losses,
    of_update,
)
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.records import Parity

CAUGHT_LATER = {"keeps the first learning rate", "replays a batch", "never clears gradients"}
"""Their first update is right."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def side(loss: float, **gradients: list[float]) -> Side:
    def show(visit: Visit) -> float:
        for name, values in gradients.items():
            visit(name, torch.tensor(values))
        return loss

    return show


class TestCompare:
    def test_errors_are_norms_of_differences(self) -> None:
        found = compare(side(1.1, b=[3.0], a=[0.0, 5.0]), side(1.0, a=[3.0, 5.0], b=[7.0]))
        assert found.relative_loss_error == pytest.approx(0.1)
        assert found.weight_errors == pytest.approx({"a": 3 / math.sqrt(34), "b": 4 / 7})
        assert found.relative_gradient_error == pytest.approx(5 / math.sqrt(83))
        assert (found.gradient_norm, found.reference_gradient_norm) == pytest.approx((math.sqrt(34), math.sqrt(83)))
        assert found.worst_weight == "b"

    def test_the_reference_runs_first_and_its_gradients_are_kept(self) -> None:
        """Both sides may write the same memory, as one model does."""
        memory, order = torch.zeros(2), []

        def writes(value: float) -> Side:
            def show(visit: Visit) -> float:
                order.append(value)
                visit("w", memory.fill_(value))
                return value

            return show

        found = compare(writes(3.0), writes(2.0))
        assert order == [2.0, 3.0]
        assert found.weight_errors == {"w": pytest.approx(0.5)}

    @pytest.mark.parametrize(
        ("candidate", "reference", "error"),
        [({}, {"w": [2.0]}, 1.0), ({"w": [2.0]}, {}, math.inf), ({"w": [0.0]}, {"w": [0.0]}, 0.0)],
    )
    def test_a_gradient_that_is_not_there_is_zero(
        self, candidate: dict[str, list[float]], reference: dict[str, list[float]], error: float
    ) -> None:
        found = compare(side(1.0, other=[1.0], **candidate), side(1.0, other=[1.0], **reference))
        assert found.weight_errors["w"] == error

    def test_shapes_that_would_broadcast_are_refused(self) -> None:
        with pytest.raises(ValueError, match="shapes"):
            compare(side(1.0, w=[1.0]), side(1.0, w=[1.0, 1.0]))

    def test_nothing_to_compare_is_refused(self) -> None:
        with pytest.raises(ValueError, match="neither side"):
            compare(side(1.0), side(1.0))

    def test_low_precision_is_compared_in_float32(self) -> None:
        def low(visit: Visit) -> float:
            visit("w", torch.full((1000,), 0.1, dtype=torch.bfloat16))
            return 1.0

        found = compare(low, side(1.0, w=[0.1] * 1000))
        assert found.weight_errors["w"] == pytest.approx(abs(float(torch.tensor(0.1).bfloat16()) / 0.1 - 1), rel=1e-4)


class TestMismatch:
    tolerance = Tolerance(loss=0.01, gradient=0.1, weight=0.5)

    @staticmethod
    def comparison(loss: float = 1.0, gradient: float = 0.0, **weights: float) -> Comparison:
        return Comparison(loss, 1.0, 1.0, 1.0, gradient, weights or {"w": 0.0})

    @pytest.mark.parametrize(
        ("found", "reason"),
        [
            (comparison(loss=1.0099, gradient=0.1, w=0.5), None),
            (comparison(loss=1.02), "the loss differs by 0.02 of the reference's, more than 0.01"),
            (comparison(loss=1.01004), "the loss differs by 0.01004 of the reference's, more than 0.01"),
            (comparison(loss=math.nan), "the loss differs by nan of the reference's, more than 0.01"),
            (comparison(gradient=0.2), "the gradient differs by 0.2 of the reference's, more than 0.1"),
            (comparison(v=0.1, w=0.6), "the gradient of w differs by 0.6 of the reference's, more than 0.5"),
            (comparison(v=math.nan, w=0.6), "the gradient of v differs by nan of the reference's, more than 0.5"),
        ],
    )
    def test_what_exceeds_its_tolerance_is_named(self, found: Comparison, reason: str | None) -> None:
        assert found.mismatch(self.tolerance) == reason

    def test_a_record_has_no_figure_that_is_none(self) -> None:
        record = self.comparison(loss=math.inf, gradient=0.25, v=0.1, w=math.inf).record(updates=7, targets=128)
        assert record == Parity(
            updates=7,
            targets=128,
            loss=None,
            reference_loss=1.0,
            relative_loss_error=None,
            relative_gradient_error=0.25,
            worst_weight="w",
            worst_weight_error=None,
        )


def losses(model: Llama, rows: torch.Tensor, size: int) -> list[Callable[[], torch.Tensor]]:
    return [lambda part=part: model.loss(part[:, :-1], part[:, 1:]) for part in rows.split(size)]


class TestLosses:
    def test_micro_batches_have_the_whole_batch_s_gradients(self) -> None:
        model = initialize(small_config().model, 1).double()
        weights, rows = dict(model.named_parameters()), next(batches(1))
        whole, parts = (of_losses(weights, losses(model, rows, size)) for size in (8, 2))
        assert compare(parts, whole).mismatch(Tolerance(1e-12, 1e-12, 1e-12)) is None
        assert all(weight.grad is None for weight in weights.values())

    def test_its_gradients_are_those_of_backward(self) -> None:
        model = initialize(small_config().model, 1)
        weights, rows = dict(model.named_parameters()), next(batches(1))

        def plain(visit: Visit) -> torch.Tensor:
            loss = model.loss(rows[:, :-1], rows[:, 1:])
            loss.backward()
            for name, weight in weights.items():
                assert weight.grad is not None
                visit(name, weight.grad)
            return loss.detach()

        found = compare(of_losses(weights, losses(model, rows, 8)), plain)
        assert (found.relative_loss_error, found.relative_gradient_error) == (0.0, 0.0)

    def test_a_wrong_gradient_of_a_small_weight_shows(self) -> None:
        model = initialize(small_config().model, 1)
        weights, rows = dict(model.named_parameters()), next(batches(1))
        honest = of_losses(weights, losses(model, rows, 8))

        def without_a_scale(visit: Visit) -> torch.Tensor | float:
            return honest(lambda name, gradient: visit(name, gradient * (name != "norm.weight")))

        reason = compare(without_a_scale, honest).mismatch(Tolerance(1e-5, 0.9, 1e-3))
        assert reason == "the gradient of norm.weight differs by 1 of the reference's, more than 0.001"


def first_update(lie: Lie | None = None, **execution: object) -> Side:
    """A side that starts a training and makes its first update."""

    def show(visit: Visit) -> torch.Tensor | float:
        with lying(lie):
            run = Run(small_config(1, **execution))
            return of_update(lambda: run.step().loss, run.optimizer, dict(run.model.named_parameters()))(visit)

    return show


class TestUpdates:
    @pytest.mark.parametrize("tolerance", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("name", LIES)
    def test_liars_are_caught_at_the_start_unless_they_lie_later(self, name: str, tolerance: Tolerance) -> None:
        found = compare(first_update(LIES[name]), first_update(micro_batch_size=8, sdpa_backend="math"))
        assert (found.mismatch(tolerance) is None) == (name in CAUGHT_LATER)

    @pytest.mark.parametrize("execution", [{"micro_batch_size": 1}, {"micro_batch_size": 4, "sdpa_backend": "flash"}])
    def test_honest_executions_pass(self, execution: dict[str, object]) -> None:
        found = compare(first_update(**execution), first_update(micro_batch_size=8, sdpa_backend="math"))
        assert found.mismatch(FLOAT32) is None

    def test_bf16_passes_its_own_tolerance_alone(self) -> None:
        model = initialize(small_config().model, 1)
        weights, rows = dict(model.named_parameters()), next(batches(1))

        def low() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model.loss(rows[:, :-1], rows[:, 1:])

        found = compare(of_losses(weights, [low]), of_losses(weights, losses(model, rows, 8)))
        assert found.mismatch(BFLOAT16) is None
        assert found.mismatch(FLOAT32) is not None

    def test_the_hook_is_gone_afterwards(self) -> None:
        run, shown = Run(small_config()), []
        of_update(lambda: run.step().loss, run.optimizer, dict(run.model.named_parameters()))(
            lambda name, gradient: shown.append(name)
        )
        run.step()
        assert shown == [name for name, _ in run.model.named_parameters()]
