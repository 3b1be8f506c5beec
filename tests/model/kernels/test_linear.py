"""A linear map's gradients in one operator against two products."""

import pytest
import torch
from triton_kernels import DEVICE, assert_replays_to_the_same_bits

from tinyllm_ray.model.kernels.linear import linear_gradients


def draw(dtype: torch.dtype = torch.float64, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 24), (rows, 16), (24, 16))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]
    return drawn[0], drawn[1], drawn[2]


def test_equals_the_two_products() -> None:
    gradient, x, weight = draw()
    found = linear_gradients(gradient, x, weight)
    torch.testing.assert_close(found, (gradient @ weight, gradient.t() @ x))


def test_is_registered_as_pytorch_wants_it() -> None:
    torch.library.opcheck(linear_gradients, draw())


@pytest.mark.gpu
def test_a_graph_replays_it_to_the_same_bits_while_memory_is_used_again() -> None:
    """Each result is the next one's operand, and its memory the one's after that."""
    gradient, x, weight = draw(torch.bfloat16, rows=32_768)

    def chain() -> torch.Tensor:
        total = torch.zeros_like(weight, dtype=torch.float32)
        of_x = x
        for _ in range(6):
            of_x, of_weight = linear_gradients(gradient, of_x / of_x.norm(), weight)
            total += of_weight
        return total

    expected = chain()
    plain, of_x = torch.zeros_like(expected), x
    for _ in range(6):
        unit = of_x / of_x.norm()
        of_x = gradient @ weight
        plain += gradient.t() @ unit
    torch.testing.assert_close(expected, plain, rtol=0, atol=0)
    assert_replays_to_the_same_bits(chain)
