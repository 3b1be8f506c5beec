"""N packed models against N of Llama, one by one."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.packed import PackedLlama, deal, initialize_packed
from tinyllm_ray.sections import ModelConfig

SHAPE = ModelConfig(layers=2, width=32, heads=4, ffn=48, context=16, vocab_size=61, init_std=0.3)
MODELS = [1, 2, 4]


def packed_and_solos(models: int, dtype: torch.dtype = torch.float64) -> tuple[PackedLlama, list[Llama]]:
    """The same weights twice; scales other than one show a misplaced norm."""
    generator = torch.Generator().manual_seed(7)
    solos = [initialize(SHAPE, seed) for seed in range(models)]
    packed = initialize_packed(SHAPE, range(models))
    for worker, solo in enumerate(solos):
        for weight in solo.parameters():
            if weight.ndim == 1:
                torch.nn.init.uniform_(weight, 0.5, 1.5, generator=generator)
        packed.load_worker(worker, dict(solo.named_parameters()))
    return packed.to(dtype), [solo.to(dtype) for solo in solos]


def random_rows(models: int, rows: int = 3, tokens: int = 17) -> torch.Tensor:
    shape = (models, rows, tokens)
    return torch.randint(SHAPE.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


class TestParity:
    @pytest.mark.parametrize("models", MODELS)
    @pytest.mark.parametrize("tokens", [5, 16])
    def test_logits_of_every_model_are_its_own(self, models: int, tokens: int) -> None:
        packed, solos = packed_and_solos(models)
        rows = random_rows(models, tokens=tokens)
        logits = packed(rows)
        assert logits.shape == (models, 3, tokens, SHAPE.vocab_size)
        for worker, solo in enumerate(solos):
            assert relative_error(logits[worker], solo(rows[worker])) < 1e-12

    @pytest.mark.parametrize("models", MODELS)
    def test_losses_and_gradients_of_every_model_are_its_own(self, models: int) -> None:
        packed, solos = packed_and_solos(models)
        check_losses_and_gradients(packed, solos, packed.loss, 1e-12)

    def test_a_models_gradients_do_not_know_of_the_others(self) -> None:
        packed, _ = packed_and_solos(3)
        rows = random_rows(3)
        packed.loss(rows[:, :, :-1], rows[:, :, 1:])[1].backward()
        for name, weight in packed.named_parameters():
            assert weight.grad is not None
            used = weight.grad.flatten(1).abs().amax(dim=1) > 0
            assert used.tolist() == [False, True, False], name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_losses_of_narrow_models_are_taken_in_float32(self, dtype: torch.dtype) -> None:
        packed, _ = packed_and_solos(2, dtype)
        rows = random_rows(2)
        losses = packed.loss(rows[:, :, :-1], rows[:, :, 1:])
        assert losses.dtype == torch.float32
        for worker, logits in enumerate(packed(rows[:, :, :-1]).double()):
            expected = functional.cross_entropy(logits.flatten(0, 1), rows[worker, :, 1:].flatten())
            assert losses[worker].item() == pytest.approx(expected.item(), rel=1e-6)

    def test_autocast_reaches_the_products(self) -> None:
        packed, solos = packed_and_solos(2, torch.float32)
        rows = random_rows(2, tokens=16)
        with torch.autocast("cpu", torch.bfloat16):
            logits = packed(rows)
            assert logits.dtype == torch.bfloat16
            for worker, solo in enumerate(solos):
                assert relative_error(logits[worker].float(), solo(rows[worker]).float()) < 0.02


def check_losses_and_gradients(
    packed: PackedLlama,
    solos: list[Llama],
    packed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tolerance: float,
) -> None:
    rows = random_rows(len(solos))
    losses = packed_loss(rows[:, :, :-1], rows[:, :, 1:])
    assert losses.shape == (len(solos),)
    losses.sum().backward()
    for worker, solo in enumerate(solos):
        loss = solo.loss(rows[worker, :, :-1], rows[worker, :, 1:])
        loss.backward()
        assert losses[worker].item() == pytest.approx(loss.item(), rel=tolerance)
        expected = dict(solo.named_parameters())
        for name, weight in packed.named_parameters():
            found, other = weight.grad, expected[name].grad
            assert found is not None
            assert other is not None
            assert relative_error(found[worker], other) < tolerance, name


class TestWeights:
    def test_names_and_shapes_are_llamas_with_the_models_before(self) -> None:
        packed, (solo, _) = packed_and_solos(2)
        shapes = {name: (2, *weight.shape) for name, weight in solo.named_parameters()}
        assert {name: tuple(weight.shape) for name, weight in packed.named_parameters()} == shapes

    def test_every_seed_starts_as_it_does_alone(self) -> None:
        packed = initialize_packed(SHAPE, [3, 5, 3])
        for worker, seed in enumerate([3, 5, 3]):
            solo = initialize(SHAPE, seed)
            for name, weight in packed.worker_weights(worker).items():
                assert torch.equal(weight, dict(solo.named_parameters())[name]), name
        assert torch.equal(packed.cos, solo.cos)
        assert torch.equal(packed.sin, solo.sin)

    def test_weights_go_from_one_place_to_another(self) -> None:
        packed, solos = packed_and_solos(3)
        before = copy.deepcopy(packed)
        packed.load_worker(2, packed.worker_weights(0))
        for worker, origin in enumerate([0, 1, 0]):
            for name, weight in packed.worker_weights(worker).items():
                assert torch.equal(weight, before.worker_weights(origin)[name]), name
        solos[0].load_state_dict(packed.worker_weights(1), strict=True)

    def test_workers_are_the_models_in_the_same_memory(self) -> None:
        packed, solos = packed_and_solos(2)
        rows = random_rows(2)
        for worker, (one, solo) in enumerate(zip(packed.workers(), solos, strict=True)):
            assert torch.equal(one(rows[worker, :, :-1]), solo(rows[worker, :, :-1]))
            for name, weight in one.named_parameters():
                assert weight.requires_grad
                assert weight.is_leaf
                with torch.no_grad():
                    weight.fill_(worker + 5)
                assert (packed.get_parameter(name)[worker] == worker + 5).all(), name

    def test_a_missing_weight_is_missed(self) -> None:
        packed, _ = packed_and_solos(1)
        weights = packed.worker_weights(0)
        del weights["norm.weight"]
        with pytest.raises(KeyError):
            packed.load_worker(0, weights)

    def test_the_average_is_of_all_workers(self) -> None:
        packed, solos = packed_and_solos(3)
        average = initialize(SHAPE, seed=9).double()
        packed.copy_average_to(average)
        named = [dict(solo.named_parameters()) for solo in solos]
        for name, weight in average.named_parameters():
            expected = sum(one[name].detach() for one in named) / 3
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
            assert weight.requires_grad


def test_rows_are_dealt_in_turn() -> None:
    rows = torch.arange(12).view(6, 2)
    dealt = deal(rows, 3)
    assert [[row[0].item() // 2 for row in own] for own in dealt] == [[0, 3], [1, 4], [2, 5]]
    assert dealt.data_ptr() == rows.data_ptr()


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("models", [2, 4])
def test_the_compiled_loss_is_one_graph_with_the_same_gradients(models: int) -> None:
    packed, solos = packed_and_solos(models)
    compiled = torch.compile(packed.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    check_losses_and_gradients(packed, solos, compiled, 1e-12)
    assert counters["stats"]["unique_graphs"] == 1
