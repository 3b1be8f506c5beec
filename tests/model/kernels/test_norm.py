"""The norm's kernels against PyTorch's operators: on a GPU as they are, elsewhere through Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from triton_kernels import DEVICE, assert_replays_to_the_same_bits, gradients, runnable, use_own_addition

from tinyllm_ray.model.operations import TORCH

norm = pytest.importorskip("tinyllm_ray.model.kernels.norm")

EPS = 0.01
"""Large enough to matter: the inputs' mean square is about one."""
ULP = 2**-7
"""Of bfloat16, relative; Triton's interpreter cuts off where a GPU rounds."""


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> Iterator[None]:
    with runnable("norm_pieces", "norm"):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(DEVICE, dtype).requires_grad_()


def compare(
    inputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], rtol: float, atol: float, only_norm: bool = False
) -> None:
    """Outputs and gradients of the kernels against PyTorch's in float64, on the same numbers."""
    exact = tuple(None if x is None else x.detach().double().requires_grad_() for x in inputs)
    skip = 1 if only_norm else 0
    found = norm.add_norm(*inputs, EPS)[skip:]
    expected = TORCH.add_norm(*exact, EPS)[skip:]
    assert [one.shape for one in found] == [one.shape for one in expected]
    found += gradients(found, [x for x in inputs if x is not None])
    expected += gradients(expected, [x for x in exact if x is not None])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (7, 5), (33, 5), (1, 24), (33, 24), (1, 320), (7, 320)])
@pytest.mark.parametrize("adds", [True, False])
def test_sum_norm_and_gradients_are_those_of_the_operators(rows: int, width: int, adds: bool) -> None:
    delta = draw(rows, width, seed=1) if adds else None
    compare((draw(rows, width), delta, draw(width, seed=2)), rtol=1e-12, atol=1e-12)


def test_its_own_addition_sums_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_addition(norm, monkeypatch)
    compare((draw(7, 5), draw(7, 5, seed=1), draw(5, seed=2)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("models", [2, 3])
def test_every_model_of_a_pack_has_its_own_scale(models: int) -> None:
    """33 rows a model: a program's rows end with its model's."""
    shape = (models * 3, 11, 24)
    compare((draw(*shape), draw(*shape, seed=1), draw(models, 24, seed=2)), rtol=1e-12, atol=1e-12)


def test_the_scale_has_the_gradient_of_all_rows_where_programs_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stripes of several steps each, the last of them short."""
    monkeypatch.setattr(norm, "_MOST_STRIPES", 3)
    step = norm._tile(24)[0]
    rows = 7 * step + 1
    assert norm._stripes(rows, 1, step) == (3, 3 * step)
    compare((draw(rows, 24), draw(rows, 24, seed=1), draw(24, seed=2)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("width", "answer"),
    [
        (320, (64, 8)),
        (192, (64, 16)),
        (640, (128, 4)),
        (1280, (256, 2)),
        (512, None),
        (64, None),
        (960, None),
        (96, None),
        (5, None),
    ],
)
def test_rows_are_cut_into_a_few_pieces_of_a_power_of_two(width: int, answer: tuple[int, int] | None) -> None:
    assert norm.pieces_of(width) == answer


@pytest.mark.parametrize(("width", "models", "rows"), [(192, 1, 1), (320, 2, 19), (640, 1, 9)])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [True, False])
def test_rows_in_pieces_have_the_gradients_of_the_operators(
    monkeypatch: pytest.MonkeyPatch, width: int, models: int, rows: int, stream: torch.dtype, adds: bool
) -> None:
    """Stripes of several steps, the last of them short, each of one model."""
    monkeypatch.setattr(norm, "_MOST_STRIPES", 2 * models)
    shape = (models, rows, width) if models > 1 else (rows, width)
    scales = (models, width) if models > 1 else (width,)
    delta = draw(*shape, dtype=torch.bfloat16, seed=1) if adds else None
    inputs = draw(*shape, dtype=stream), delta, draw(*scales, dtype=torch.float32, seed=2)
    tolerance = 2e-5 if stream == torch.float32 and not adds else 3e-2
    compare(inputs, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("rows", [1, 4, 31, 512, 2049, 32_768, 131_072])
@pytest.mark.parametrize("models", [1, 3, 8, 1000])
@pytest.mark.parametrize("step", [1, 4, 16])
def test_stripes_hold_every_row_once_and_none_is_empty(rows: int, models: int, step: int) -> None:
    stripes, stripe = norm._stripes(rows, models, step)
    assert stripe % step == 0
    assert (stripes - 1) * stripe < rows <= stripes * stripe
    assert stripes <= max(1, -(-norm._MOST_STRIPES // models))


@pytest.mark.parametrize(
    ("stream", "addition", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-5),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.bfloat16, torch.bfloat16, 3e-2),
    ],
)
def test_rounds_as_little_as_its_dtypes_allow(stream: torch.dtype, addition: torch.dtype, tolerance: float) -> None:
    inputs = draw(7, 320, dtype=stream), draw(7, 320, dtype=addition, seed=1), draw(320, dtype=torch.float32, seed=2)
    compare(inputs, rtol=tolerance, atol=tolerance)


def test_a_bfloat16_stream_is_normalised_in_float32() -> None:
    """A mean of squares in bfloat16 would be off by percents."""
    x = draw(3, 320, dtype=torch.bfloat16)
    scale = torch.ones(320, device=DEVICE)
    _, normed = norm.add_norm(x, None, scale, EPS)
    exact = TORCH.add_norm(x.double(), None, scale.double(), EPS)[1]
    torch.testing.assert_close(normed.double(), exact, rtol=ULP, atol=0)


def test_the_sum_may_go_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last norm's: nothing is added to its sum any more, and no zeros are read in its place."""
    backward, given = norm._add_norm_backward, []
    monkeypatch.setattr(norm, "_add_norm_backward", lambda *seen: given.append(seen[1]) or backward(*seen))
    compare((draw(7, 24), draw(7, 24, seed=1), draw(24, seed=2)), rtol=1e-12, atol=1e-12, only_norm=True)
    assert given == [None]


def test_gradients_of_both_addends_are_one_number_in_their_own_dtypes() -> None:
    x, delta = draw(7, 24, dtype=torch.float32), draw(7, 24, dtype=torch.bfloat16, seed=1)
    dx, ddelta = gradients(norm.add_norm(x, delta, draw(24, dtype=torch.float32, seed=2), EPS), [x, delta])
    assert (dx.dtype, ddelta.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(ddelta.float(), dx, rtol=ULP, atol=0)


def test_without_an_addition_the_stream_is_handed_on_as_it_is() -> None:
    x = draw(3, 24)
    assert norm.add_norm(x, None, draw(24), EPS)[0] is x


def test_strided_inputs_are_read_by_their_strides() -> None:
    x, delta = draw(24, 7).t(), draw(7, 48, seed=1)[:, ::2]
    found, expected = norm.add_norm(x, delta, draw(24), EPS), TORCH.add_norm(x, delta, draw(24), EPS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_writes_what_matrix_products_want_under_autocast() -> None:
    x, scale = draw(3, 24, dtype=torch.float32), draw(24, dtype=torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        total, normed = norm.add_norm(x, x.bfloat16(), scale, EPS)
        _, exact = norm.add_norm(x.double(), None, scale.double(), EPS)
    assert (total.dtype, normed.dtype, exact.dtype) == (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("adds", [True, False])
def test_is_registered_as_pytorch_wants_it(adds: bool) -> None:
    delta = draw(5, 24, seed=1) if adds else None
    torch.library.opcheck(norm._add_norm, (draw(5, 24), delta, draw(24, seed=2), EPS, torch.float64))


def test_compiles_into_one_graph() -> None:
    inputs = draw(5, 24), draw(5, 24, seed=1), draw(24, seed=2)
    compiled = torch.compile(lambda *given: norm.add_norm(*given, EPS), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), norm.add_norm(*inputs, EPS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found, expected = gradients(found, list(inputs)), gradients(expected, list(inputs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows = 2**31 // 1024 + 8
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = torch.randn(1024, device=DEVICE)
    x.requires_grad_()
    scale = torch.ones(1024, device=DEVICE, requires_grad=True)
    total, normed = norm.add_norm(x, x.detach(), scale, EPS)
    expected = TORCH.add_norm(x[-1:], x[-1:].detach(), scale, EPS)
    torch.testing.assert_close((total[-1:], normed[-1:].float()), expected, rtol=1e-2, atol=1e-2)
    (dx,) = torch.autograd.grad(normed[-1].float().pow(2).sum(), [x])
    (own,) = torch.autograd.grad(expected[1].pow(2).sum(), [x])
    torch.testing.assert_close(dx[-1], own[-1], rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_a_graph_replays_it_to_the_same_bits() -> None:
    x, delta, scale = draw(64, 320, dtype=torch.float32), draw(64, 320, dtype=torch.bfloat16, seed=1), draw(320, seed=2)

    def once() -> tuple[torch.Tensor, ...]:
        outputs = norm.add_norm(x, delta, scale, EPS)
        gradients = torch.autograd.grad(outputs, [x, delta, scale], [torch.ones_like(one) for one in outputs])
        return *(one.detach() for one in outputs), *gradients

    assert_replays_to_the_same_bits(once)
