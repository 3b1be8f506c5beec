"""Projection and loss in one operator against float64: on a GPU as it is, elsewhere through Triton's interpreter."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tinyllm_ray.model.losses import IGNORED

kernel = pytest.importorskip("tinyllm_ray.model.kernels.cross_entropy")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    """Triton decides where a kernel is defined whether it is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.reload(kernel)
        yield
    importlib.reload(kernel)


def draw(rows: int, words: int, features: int, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Operands:
    """Hidden states and weights that require gradients, and targets, of which the second is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = spread * torch.randn(rows, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(words, features, generator=generator, dtype=torch.float64)
    targets = torch.randint(words, (rows,), generator=generator)
    targets[1:2] = IGNORED
    targets[-1] = words - 1  # in the last, incomplete block
    leaves = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(DEVICE)


def reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: float = 1.0) -> Operands:
    """PyTorch's loss of the same operands in float64, with its gradients."""
    leaves = [tensor.detach().double().clone().requires_grad_() for tensor in (hidden, weight)]
    loss = functional.cross_entropy(functional.linear(*leaves), targets, ignore_index=IGNORED)
    (loss * upstream).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[return-value]


def found(operands: Operands, upstream: float = 1.0, **sizes: int | None) -> Operands:
    loss = kernel.linear_cross_entropy(*operands, **sizes)
    (loss * upstream).backward()
    return loss.detach(), operands[0].grad, operands[1].grad  # type: ignore[return-value]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference over the norm of `other`."""
    return float((one.double() - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("rows", "words", "features", "chunk", "block"),
    # a row held whole and in several blocks, with and without a rest
    [(1, 61, 8, None, 64), (7, 100, 24, 3, 32), (33, 61, 8, 10, 16), (2, 1000, 8, None, 256), (3, 1003, 24, 1, 1024)],
)
def test_equals_float64_with_its_gradients(rows: int, words: int, features: int, chunk: int, block: int) -> None:
    operands = draw(rows, words, features)
    expected = reference(*operands, upstream=0.37)
    for one, other in zip(found(operands, 0.37, chunk_rows=chunk, row_block=block), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("block", [32, 128])
def test_float32_operands_give_float32_losses_and_gradients(block: int) -> None:
    operands = draw(5, 100, 24, torch.float32)
    expected = reference(*operands)
    for one, other in zip(found(operands, chunk_rows=2, row_block=block), expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_bfloat16_costs_the_rounding_of_logits_and_gradients_and_no_more() -> None:
    operands = draw(7, 300, 24, torch.bfloat16, spread=0.3)
    loss, of_hidden, of_weight = found(operands, chunk_rows=3, row_block=128)
    expected = reference(*operands)
    assert (loss.dtype, of_hidden.dtype, of_weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-3)
    assert distance(of_hidden, expected[1]) < 5e-3
    assert distance(of_weight, expected[2]) < 5e-3


def test_rows_that_fit_are_told_apart_like_those_in_blocks() -> None:
    """More rows than programs, one of them ignored, the target of one outside, one with an infinite logit."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 100, generator=generator)).to(DEVICE, torch.bfloat16)
    logits[7, 20] = float("inf")
    targets = torch.randint(100, (9,), generator=generator).to(DEVICE)
    targets[1], targets[2], targets[3] = IGNORED, 99, 2**40
    whole, losses = logits.clone(), logits.new_empty(9, dtype=torch.float32)
    kernel._over_rows(whole, targets, losses, 128, gradient=True)
    blocks, expected = logits.float(), losses.clone()
    kernel._over_rows(blocks, targets, expected, 32, gradient=True)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert losses.isnan().tolist() == [row in (3, 7) for row in range(9)]
    finite = [row for row in range(9) if row != 7]
    torch.testing.assert_close(whole[finite].float(), blocks[finite], rtol=1e-2, atol=1e-6)


def test_a_row_that_shared_memory_does_not_hold_twice_more_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of 32,000 words is where a program has 99 KB."""
    monkeypatch.setattr(kernel, "_capacity", lambda device: (2, 4 * 512 + 1023))
    monkeypatch.setattr(kernel, "tinyllm_cross_entropy_rows", None)
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    targets = torch.tensor([0, 99, IGNORED], device=DEVICE)
    losses = logits.new_empty(3, dtype=torch.float32)
    expected = torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    kernel._over_rows(logits, targets, losses, 128, gradient=True)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_chunks_are_summed_in_float32() -> None:
    """In bfloat16 the small chunks after the first, large one would be lost: each is less than half of its last bit."""
    hidden = torch.cat((torch.ones(1, 8), torch.full((32, 8), 1e-3))).to(DEVICE, torch.bfloat16)
    weight = draw(1, 4, 8, torch.bfloat16)[1].detach()
    targets = torch.zeros(33, dtype=torch.int64, device=DEVICE)
    _, _, first = kernel._summed_with_gradients(hidden[:1], weight, targets[:1], 1, 4)
    _, _, whole = kernel._summed_with_gradients(hidden, weight, targets, 33, 4)
    _, _, by_rows = kernel._summed_with_gradients(hidden, weight, targets, 1, 4)
    assert by_rows.dtype == torch.float32
    assert distance(first, whole.double()) > 1e-2
    torch.testing.assert_close(by_rows, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block", [16, 64])
def test_logits_of_ten_thousand_neither_overflow_nor_vanish(block: int) -> None:
    hidden = torch.tensor([[1e4], [-1e4], [1e4]], device=DEVICE, requires_grad=True)
    weight = torch.linspace(-1, 1, 61, device=DEVICE).unsqueeze(1).requires_grad_()
    operands = (hidden, weight, torch.tensor([60, 60, 0], device=DEVICE))
    expected = reference(*operands)
    assert expected[0] > 1e4
    for one, other in zip(found(operands, row_block=block), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_ignored_targets_add_nothing_and_are_not_counted() -> None:
    operands = draw(4, 61, 8)
    loss, of_hidden, _ = found(operands)
    kept = operands[2] != IGNORED
    assert loss.item() == pytest.approx(reference(operands[0][kept], operands[1], operands[2][kept])[0].item())
    assert (of_hidden.abs().sum(1) > 0).tolist() == kept.tolist()


@pytest.mark.parametrize("target", [-1, 61, 2**40])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan(target: int) -> None:
    hidden, weight, targets = draw(3, 61, 8)
    targets[0] = target
    assert kernel.linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("block", [16, 64])
def test_logits_that_are_not_finite_make_the_loss_nan(value: float, block: int) -> None:
    """Maxima leave nan out; the guard against faults would see nothing."""
    hidden, weight, targets = draw(3, 61, 8)
    with torch.no_grad():
        weight[20, 0] = value
        hidden[:, 0] = 1
    assert kernel.linear_cross_entropy(hidden, weight, targets, row_block=block).isnan()


def test_without_gradients_the_value_is_the_same_and_nothing_else_is_computed() -> None:
    operands = draw(5, 61, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        loss = kernel.linear_cross_entropy(*operands, chunk_rows=2, row_block=16)
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm")]
    assert len(products) == 3  # the logits of the three chunks
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(reference(*operands)[0].item(), rel=1e-12)


def test_no_logits_outlive_the_forward_pass() -> None:
    hidden, weight, targets = draw(5, 61, 8)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        kernel.linear_cross_entropy(hidden, weight, targets)
    assert {hidden.shape, weight.shape} <= set(kept)
    assert torch.Size((5, 61)) not in kept


def test_autocast_does_not_narrow_what_is_given() -> None:
    operands = draw(5, 61, 8, torch.float32)
    plain = found(operands, chunk_rows=2)
    operands[0].grad = operands[1].grad = None
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = kernel.linear_cross_entropy(*operands, chunk_rows=2)
    loss.backward()
    assert torch.equal(loss.detach(), plain[0])
    assert torch.equal(operands[1].grad, plain[2])


def test_operands_with_other_strides_are_read_right() -> None:
    hidden, weight, targets = draw(6, 61, 8)
    expected = reference(hidden, weight, targets)
    turned = [tensor.detach().t().contiguous().t().requires_grad_() for tensor in (hidden, weight)]
    every_other = targets.repeat_interleave(2)[::2]
    assert not turned[0].is_contiguous()
    assert not every_other.is_contiguous()
    for one, other in zip(found((*turned, every_other), chunk_rows=4), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_its_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, targets = draw(3, 5, 2)
    assert torch.autograd.gradcheck(lambda *leaves: kernel.linear_cross_entropy(*leaves, targets), (hidden, weight))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_the_compiler_traces_over_it(backend: str) -> None:
    hidden, weight, targets = draw(5, 61, 8)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = kernel.linear_cross_entropy(hidden * 2, weight, targets, chunk_rows=3) / 3
        return found

    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    expected = torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))
    found = torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, targets), loss(hidden, weight, targets))


def test_the_operators_keep_what_pytorch_asks_of_operators() -> None:
    hidden, weight, targets = draw(3, 8, 4, torch.float32)
    torch.library.opcheck(kernel._summed_with_gradients, (hidden, weight, targets, 2, 4))
    torch.library.opcheck(kernel._summed, (hidden.detach(), weight.detach(), targets, 2, 4))


def test_chunks_are_equal_and_wide_enough_for_the_weights_gradient() -> None:
    sizes = {
        (rows, features): kernel.rows_of_chunk(rows, features) for rows in (4096, 32768) for features in (320, 640)
    }
    assert sizes == {(4096, 320): 4096, (4096, 640): 4096, (32768, 320): 8192, (32768, 640): 16384}
    assert kernel.rows_of_chunk(8193, 512) == 4097
    assert kernel.rows_of_chunk(1, 8) == 1


@pytest.mark.parametrize(
    ("hidden", "weight", "targets"),
    [((3, 8), (61, 9), (3,)), ((3, 8), (61, 8), (2,)), ((3, 2, 4), (61, 4), (3,)), ((3, 8), (61, 8), (3, 1))],
)
def test_shapes_that_do_not_fit_are_refused(hidden: list[int], weight: list[int], targets: list[int]) -> None:
    """The kernel would read beyond their memory."""
    with pytest.raises(ValueError, match=r"have to be \[M, D\], \[V, D\] and \[M\]"):
        kernel.linear_cross_entropy(torch.ones(hidden), torch.ones(weight), torch.zeros(targets, dtype=torch.int64))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_other_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    hidden, weight = (torch.ones(3, 8, dtype=dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match="bfloat16, float32 or float64"):
        kernel.linear_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("words", [32_000, 50_257])
@pytest.mark.parametrize("block", [1024, 4096, 8192, 65_536])
def test_a_models_sizes_on_the_device(words: int, block: int) -> None:
    operands = draw(300, words, 320, torch.bfloat16, spread=0.05)
    expected = reference(*operands)
    loss, of_hidden, of_weight = found(operands, chunk_rows=128, row_block=block)
    assert loss.item() == pytest.approx(expected[0].item(), rel=1e-4)
    assert distance(of_hidden, expected[1]) < 1e-2
    assert distance(of_weight, expected[2]) < 1e-2
    again = draw(300, words, 320, torch.bfloat16, spread=0.05)
    for one, other in zip(found(again, chunk_rows=128, row_block=block), (loss, of_hidden, of_weight), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_captured_graph_takes_new_rows_and_upstream_gradients() -> None:
    hidden, weight, targets = draw(300, 1003, 64, torch.bfloat16, spread=0.3)
    scale = torch.ones((), device=DEVICE)

    def run() -> Operands:
        loss = kernel.linear_cross_entropy(hidden, weight, targets, chunk_rows=128)
        return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))  # type: ignore[return-value]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        hidden.copy_(hidden.flip(0))
        targets.copy_((targets + 1) % 1003)
        scale.fill_(0.25)
    graph.replay()
    for one, other in zip(captured, run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_logits_beyond_two_to_the_31st_are_reached() -> None:
    """70,000 rows of 32,000: an offset of 32 bits would wrap in the last rows."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    drawn = [torch.randn(rows, 64, device=DEVICE, generator=generator).bfloat16() for rows in (70_000, 32_000)]
    targets = torch.randint(32_000, (70_000,), device=DEVICE, generator=generator)
    whole = kernel._summed_with_gradients(*drawn, targets, 70_000, 8192)
    chunks = kernel._summed_with_gradients(*drawn, targets, 8192, 8192)
    assert whole[0].item() == pytest.approx(chunks[0].item(), rel=1e-6)
    assert distance(whole[1][-4000:], chunks[1][-4000:].double()) < 5e-3
    assert distance(whole[2], chunks[2].double()) < 5e-3


@pytest.mark.gpu
def test_memory_is_a_chunks_logits_and_the_gradients() -> None:
    hidden, weight, targets = draw(8192, 32_000, 64, torch.bfloat16)
    kernel.linear_cross_entropy(hidden, weight, targets, chunk_rows=1024)  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel.linear_cross_entropy(hidden, weight, targets, chunk_rows=1024)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 1.2 * (1024 * 32_000 * 2 + 32_000 * 64 * 4 + 8192 * 64 * 2)
