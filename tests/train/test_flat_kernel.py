"""The flat kernels one by one: on a GPU as they are, elsewhere through Triton's interpreter."""

import math
from collections.abc import Iterator

import pytest
import torch
from flat_kernels import DEVICE, runnable

from tinyllm_ray.train import flat_kernel
from tinyllm_ray.train.flat_kernel import BLOCK, Places, collect, place, settle, update
from tinyllm_ray.train.packed_optimizer import _scales

MATRICES, SCALES = (2 * BLOCK + 5, 3, BLOCK), (37, 1, BLOCK + 1)
"""Lengths: whole blocks, parts of one, and one element more than one."""


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


def drawn(lengths: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for length in lengths]


def flattened(tensors: list[torch.Tensor], places: Places, dtype: torch.dtype) -> torch.Tensor:
    """Each in its blocks, zeros behind it."""
    flat = torch.zeros(places.blocks * BLOCK, dtype=dtype, device=DEVICE)
    for tensor, first in zip(tensors, places.first, strict=True):
        flat[first * BLOCK : first * BLOCK + len(tensor)] = tensor.to(dtype)
    return flat


class TestCollect:
    @pytest.mark.parametrize(
        ("given", "kept", "scales", "micro_batches"),
        [
            (torch.bfloat16, torch.bfloat16, torch.float32, 1),
            (torch.bfloat16, torch.float32, torch.float32, 3),
            (torch.float64, torch.float64, torch.float64, 3),
        ],
    )
    def test_sums_go_where_they_belong_with_their_squares_and_zeros_behind_them(
        self, given: torch.dtype, kept: torch.dtype, scales: torch.dtype, micro_batches: int
    ) -> None:
        places = place(MATRICES), place(SCALES)
        sums = tuple(
            torch.full((one.blocks * BLOCK,), math.nan, dtype=dtype, device=DEVICE)  # what was there does not count
            for one, dtype in zip(places, (kept, scales), strict=True)
        )
        blocks = sum(one.blocks for one in places)
        partials = torch.full((blocks,), math.nan, dtype=torch.float64, device=DEVICE)
        total = torch.full((), math.nan, dtype=torch.float64, device=DEVICE)
        expected = [torch.zeros(one.blocks * BLOCK, dtype=torch.float64, device=DEVICE) for one in places]
        for number in range(micro_batches):
            halves = drawn(MATRICES, given, 2 * number), drawn(SCALES, scales, 2 * number + 1)
            loss = torch.tensor(0.5 + number, device=DEVICE)
            collect(halves, places, sums, partials, loss, total, add=number > 0)
            for half, one, outcome in zip(halves, places, expected, strict=True):
                outcome += flattened(half, one, torch.float64)
        for found, wanted in zip(sums, expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0 if micro_batches == 1 else 1e-6)
        squares = torch.cat(expected).square().view(-1, BLOCK).sum(1)
        torch.testing.assert_close(partials, squares, rtol=1e-6, atol=0)
        assert total.item() == sum(0.5 + number for number in range(micro_batches))

    def test_a_gradient_that_is_not_contiguous_is_read_as_it_is_meant(self) -> None:
        places = place([6]), place([2])
        sums = torch.zeros(BLOCK, device=DEVICE), torch.zeros(BLOCK, device=DEVICE)
        partials, total = (torch.zeros(shape, dtype=torch.float64, device=DEVICE) for shape in ((2,), ()))
        matrix = torch.arange(6.0, device=DEVICE).view(3, 2).t()
        collect(([matrix], [matrix.new_ones(2)]), places, sums, partials, total.float(), total, add=False)
        assert sums[0][:7].tolist() == [0, 2, 4, 1, 3, 5, 0]

    def test_equal_gradients_give_equal_bits(self) -> None:
        places = place(MATRICES), place(SCALES)
        found = []
        for _ in range(2):
            sums = (
                torch.zeros(places[0].blocks * BLOCK, device=DEVICE),
                torch.zeros(places[1].blocks * BLOCK).to(DEVICE),
            )
            partials = torch.zeros(places[0].blocks + places[1].blocks, dtype=torch.float64, device=DEVICE)
            halves = drawn(MATRICES, torch.float32, 0), drawn(SCALES, torch.float32, 1)
            collect(halves, places, sums, partials, partials[0].float(), partials.new_zeros(()), add=False)
            found.append(partials)
        assert torch.equal(*found)


class Settling:
    """Everything `settle` reads and writes, for a norm and a loss of the test's choosing."""

    betas, eps, decay, rate = (0.9, 0.999), 1e-8, 0.1, 0.003

    def __init__(self, steps: int = 0, limit: float = 1.0, micro_batches: int = 1, blocks: int = 5000) -> None:
        def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        self.settings = tensor(*self.betas, self.eps, self.decay, limit, micro_batches)
        self.given = tensor(self.rate, dtype=torch.float32)[0]
        self.steps = tensor(steps, dtype=torch.float32)[0]
        self.stopped = tensor(0, dtype=torch.float32)[0]
        self.figures = tensor(*[math.nan] * 8)
        self.said = tensor(0, 0, dtype=torch.float32)
        self.blocks = blocks

    def settle(self, loss: float = 2.0, norm: float = 0.5) -> list[float]:
        partials = torch.full((self.blocks,), norm**2 / self.blocks, dtype=torch.float64, device=DEVICE)
        total = torch.tensor(loss, dtype=torch.float64, device=DEVICE)
        settle(partials, total, self.settings, self.given, self.steps, self.stopped, self.figures, self.said)
        return self.said.tolist()


class TestSettle:
    @pytest.mark.parametrize("steps", [0, 1, 7, 100_000])
    def test_figures_are_those_of_the_packed_optimizer_for_one_model(self, steps: int) -> None:
        one = Settling(steps)
        one.settle(norm=4.0)

        def each(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor([value], dtype=dtype, device=DEVICE)

        names = ("beta1", "beta2", "eps", "weight_decay")
        group = dict(zip(names, map(each, (*one.betas, one.eps, one.decay)), strict=True))
        group["lr"] = each(one.rate, torch.float32)
        expected = _scales(group, each(steps + 1), each(0).bool(), each(1 / (4 + 1e-6)))
        torch.testing.assert_close(one.figures, expected[:, 0], rtol=1e-13, atol=0)
        assert one.steps.item() == steps + 1

    def test_a_beta_of_zero_has_no_bias(self) -> None:
        one = Settling(3)
        one.settings[:2] = 0.0
        one.settle()
        assert one.figures[4].item() == one.given.item()
        assert one.figures[5].item() == 1.0

    @pytest.mark.parametrize("blocks", [1, 3, 4097, 9001])
    def test_loss_is_the_mean_and_norm_that_of_all_blocks(self, blocks: int) -> None:
        one = Settling(micro_batches=4, blocks=blocks)
        assert one.settle(loss=10.0, norm=3.0) == pytest.approx([2.5, 3.0], rel=1e-6)

    @pytest.mark.parametrize(
        ("limit", "norm", "scale"), [(1.0, 4.0, 0.25), (2.0, 0.5, 1.0), (math.inf, 1e3, 1.0), (1.0, 0.0, 1.0)]
    )
    def test_clips_to_the_limit_where_there_is_one(self, limit: float, norm: float, scale: float) -> None:
        one = Settling(limit=limit)
        one.settle(norm=norm)
        assert one.figures[0].item() == pytest.approx(scale, rel=1e-6)

    @pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
    def test_a_fault_stops_for_good_and_counts_no_step(self, loss: float, norm: float) -> None:
        one = Settling(5)
        said = one.settle(loss, norm)
        assert [math.isfinite(value) for value in said] == [math.isfinite(loss), math.isfinite(norm)]
        for _ in range(2):
            assert (one.stopped.item(), one.steps.item(), one.figures[7].item()) == (1.0, 5.0, 1.0)
            after = one.settle()
            assert math.isnan(after[0])
            assert after[1] == pytest.approx(0.5)

    def test_a_huge_norm_is_no_fault(self) -> None:
        one = Settling()
        one.settle(norm=1e15)
        assert (one.stopped.item(), one.steps.item()) == (0.0, 1.0)


class TestUpdate:
    """Of two blocks of matrices and one of norm scales."""

    @staticmethod
    def build(stopped: float = 0.0) -> tuple[torch.Tensor, ...]:
        """Masters, means, squares, shadows, both gradients, and figures."""
        whole = [one.abs() for one in drawn((3 * BLOCK,) * 3, torch.float32, 0)]
        shadows = torch.zeros(2 * BLOCK, dtype=torch.bfloat16, device=DEVICE)
        gradients = drawn((2 * BLOCK, BLOCK), torch.float32, 1)
        numbers = [0.5, 0.75, 0.1, 0.01, 0.003, 0.9, 1e-3, stopped]
        figures = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
        return *whole, shadows, gradients[0].bfloat16(), gradients[1], figures

    def test_equals_the_formula_in_float64(self) -> None:
        masters, means, squares, shadows, matrices, scales, figures = self.build()
        x, m, v = (one.double() for one in (masters, means, squares))
        g = 0.5 * torch.cat([matrices.double(), scales.double()])
        keep = torch.where(torch.arange(len(x), device=DEVICE) < 2 * BLOCK, 0.75, 1.0)
        update(masters, means, squares, shadows, (matrices, scales), figures)
        m, v = m + 0.1 * (g - m), v + 0.01 * (g**2 - v)
        x = x * keep - 0.003 * m / (v.sqrt() / 0.9 + 1e-3)
        for found, expected in ((masters, x), (means, m), (squares, v)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)

    def test_shadows_are_the_masters_rounded_to_the_nearest(self) -> None:
        masters, means, squares, shadows, *gradients, figures = self.build()
        update(masters, means, squares, shadows, (gradients[0], gradients[1]), figures)
        expected = masters[: 2 * BLOCK].bfloat16()
        if DEVICE.type == "cuda":
            assert torch.equal(shadows, expected)
        else:  # the interpreter cuts bits off
            torch.testing.assert_close(shadows, expected, rtol=2**-7, atol=0)

    def test_a_stopped_one_keeps_every_bit(self) -> None:
        held = self.build(stopped=1.0)
        held[4][:] = math.nan
        before = [tensor.clone() for tensor in held[:4]]
        update(*held[:4], (held[4], held[5]), held[6])
        assert all(map(torch.equal, held[:4], before))


def test_every_tensor_begins_with_a_block() -> None:
    places = flat_kernel.place((1, BLOCK, BLOCK + 1, 5))
    assert (places.first, places.blocks) == ((0, 1, 2, 4), 5)
