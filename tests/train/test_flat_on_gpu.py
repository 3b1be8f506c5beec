"""On a GPU: updates over flat buffers near those with PyTorch's optimizer, and captured whole."""

from collections.abc import Callable, Iterator

import pytest
import torch
from flat_kernels import DEVICE
from poison import random_batch, weights_of

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.flat_update import FlatUpdate
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.update import Update

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.gpu

COMPILED = ("default", "max-autotune-no-cudagraphs", "reduce-overhead")


@pytest.fixture(autouse=True)
def _each_on_its_own() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def build(config: Config) -> tuple[Llama, FlatUpdate]:
    model = initialize(config.model, config.training.seed).to(DEVICE)
    return model, FlatUpdate(model, config)


def batch_of(config: Config, seed: int) -> torch.Tensor:
    return random_batch(config, seed).to(DEVICE)


@pytest.mark.parametrize("mode", [None, *COMPILED])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_losses_are_near_those_with_torchs_optimizer(tiny: MakeConfig, mode: str | None, micro_batch_size: int) -> None:
    execution = {"micro_batch_size": micro_batch_size}
    plain = tiny(execution=execution)
    config = tiny(execution=execution | ({"update": "compiled", "compile_mode": mode} if mode else {}))
    other = initialize(plain.model, plain.training.seed).to(DEVICE)
    reference = Update(other, build_optimizer(other, plain.optimizer, DEVICE), plain)
    model, update = build(config)
    for seed in range(20):
        said, expected = update(batch_of(config, seed % 4), 0.003), reference(batch_of(config, seed % 4), 0.003)
        assert said.loss.item() == pytest.approx(expected.loss.item(), rel=5e-3)
        assert said.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=3e-2)
    for name, weight in weights_of(model).items():
        assert (weight - other.get_parameter(name)).norm() / weight.norm() < 0.05, name
    for weight, master in zip(update.buffers.twin_weights, update.buffers.weights.values(), strict=True):
        assert torch.equal(weight, master.to(weight.dtype))


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_a_captured_update_replays_what_it_does(tiny: MakeConfig, micro_batch_size: int) -> None:
    """Rates, rows and loaded weights come from outside the graph."""
    config = tiny(execution={"micro_batch_size": micro_batch_size, "sdpa_backend": "math"})  # nothing atomic
    (_, direct), (model, captured) = build(config), build(config)
    rows = torch.empty_like(batch_of(config, 0))

    def prepare(update: FlatUpdate, seed: int, rate: float) -> None:
        rows.copy_(batch_of(config, seed))
        update.prepare(rate)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(3):
            prepare(captured, seed, 0.003)
            captured.run(rows)
    torch.cuda.current_stream().wait_stream(stream)
    for seed in range(3):
        prepare(direct, seed, 0.003)
        direct.run(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = captured.run(rows)
    for seed, rate in enumerate((0.003, 0.0, 0.01, 0.003), 3):
        prepare(captured, seed, rate)
        graph.replay()
        prepare(direct, seed, rate)
        expected = direct.run(rows)
        assert said.loss.item() == pytest.approx(expected.loss.item(), rel=1e-4)
        assert said.grad_norm.item() == pytest.approx(expected.grad_norm.item(), rel=1e-3)
        torch.testing.assert_close(captured.buffers.masters, direct.buffers.masters, rtol=1e-3, atol=1e-4)
    fresh = initialize(config.model, config.training.seed).to(DEVICE)
    first = fresh.loss(rows[:, :-1], rows[:, 1:]).item()
    model.load_state_dict(fresh.state_dict())
    captured.prepare(0.003)
    graph.replay()
    assert said.loss.item() == pytest.approx(first, rel=5e-3)


def test_a_fault_inside_a_graph_stops_it(tiny: MakeConfig) -> None:
    config = tiny()
    model, update = build(config)
    rows = batch_of(config, 0)
    for _ in range(2):
        update(rows, 0.003)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = update.run(rows)
    graph.replay()
    with torch.no_grad():
        model.norm.weight[3] = float("nan")  # shared with the twin, so that it is seen at once
    before = weights_of(model)
    for _ in range(2):
        update.prepare(0.003)
        graph.replay()
        assert said.loss.isnan()
    assert update.stopped.item() == 1.0
    for name, weight in weights_of(model).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num()), name
