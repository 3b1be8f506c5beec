"""Updates of N packed models against N runs of one model on the rows each is dealt, step by step."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import one_layer
from torch._dynamo.utils import counters

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.sections import Scheme
from tinyllm_ray.train.mixing import mixing_matrix
from tinyllm_ray.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from tinyllm_ray.train.packed_backward import AtOnce, Backward, OneByOne
from tinyllm_ray.train.packed_optimizer import PackedAdamW, build_packed_optimizer
from tinyllm_ray.train.packed_update import PackedUpdate
from tinyllm_ray.train.update import Loss, Update

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


RATES = (0.01, 0.03, 0.0, 0.002)
ROWS = 8


@pytest.fixture
def config(tiny: MakeConfig) -> Config:
    """Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
    return tiny(optimizer={"gradient_clip": 0.5, "eps": 0.01})


def of_one_worker(config: Config, models: int) -> Config:
    values = config.model_dump(mode="json")
    values["training"]["tokens_per_update"] //= models
    values["execution"]["micro_batch_size"] = 1
    return Config.model_validate(values)


def random_batch(config: Config, seed: int, rows: int = ROWS) -> torch.Tensor:
    shape = (rows, config.model.context + 1)
    return torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def build(
    config: Config,
    seeds: list[int],
    scheme: Scheme | None,
    micro_batch_size: int = 1,
    compiled: bool = False,
    one_by_one: bool = False,
) -> tuple[PackedLlama, PackedAdamW, PackedUpdate]:
    def build_loss(model: Llama | PackedLlama) -> Loss:
        if not compiled:
            return model.loss
        loss: Loss = torch.compile(model.loss, backend="aot_eager", fullgraph=True, dynamic=False)
        return loss

    model = initialize_packed(config.model, seeds).double()
    optimizer = build_packed_optimizer(model.parameters(), config.optimizer)
    backward: Backward = AtOnce(build_loss(model), micro_batch_size)
    if one_by_one:
        backward = OneByOne(model, build_loss, micro_batch_size)
    clip = config.optimizer.gradient_clip
    return model, optimizer, PackedUpdate(model, optimizer, backward, gradient_clip=clip, scheme=scheme)


def assert_same(model: PackedLlama, solos: list[Llama], tolerance: float = 1e-9) -> None:
    for worker, solo in enumerate(solos):
        weights = model.worker_weights(worker)
        for name, expected in solo.named_parameters():
            error = (weights[name] - expected.detach()).norm() / expected.detach().norm()
            assert error < tolerance, f"model {worker}, {name}: {error}"


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestUnmixed:
    @pytest.mark.usefixtures("_fresh_compiler")
    @pytest.mark.parametrize("one_by_one", [False, True])
    @pytest.mark.parametrize(("models", "compiled"), [(1, False), (2, False), (4, False), (2, True)])
    def test_every_model_trains_as_the_trainer_trains_it_alone(
        self, config: Config, models: int, one_by_one: bool, compiled: bool
    ) -> None:
        seeds = list(range(40, 40 + models))
        model, optimizer, update = build(config, seeds, None, 2, compiled, one_by_one)
        alone = of_one_worker(config, models)
        solos = [initialize(config.model, seed).double() for seed in seeds]
        updates = [Update(solo, build_optimizer(solo, config.optimizer, torch.device("cpu")), alone) for solo in solos]
        for step, rate in enumerate(RATES):
            batch = random_batch(config, step)
            set_learning_rate(optimizer, rate)
            said = update(batch)
            for worker, solo_update in enumerate(updates):
                expected = solo_update(batch[worker::models], rate)
                assert expected.grad_norm > 0.5, "clipping bites"
                assert said.loss[worker].item() == pytest.approx(expected.loss.item(), rel=1e-9)
                assert said.grad_norm[worker].item() == pytest.approx(expected.grad_norm.item(), rel=1e-9)
            assert_same(model, solos)

    @pytest.mark.parametrize("one_by_one", [False, True])
    def test_micro_batches_change_nothing(self, config: Config, one_by_one: bool) -> None:
        runs = []
        for micro_batch_size in (1, 2, 4):
            model, optimizer, update = build(config, [1, 2], None, micro_batch_size, one_by_one=one_by_one)
            set_learning_rate(optimizer, 0.01)
            said = [update(random_batch(config, step)) for step in range(2)]
            runs.append([*said[0], *said[1], *model.parameters()])
        for other in runs[1:]:
            for one, two in zip(runs[0], other, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)

    def test_a_model_that_leaves_the_finite_stops_alone(self, config: Config) -> None:
        model, optimizer, update = build(config, [1, 2, 3, 4], None)
        whole, other_optimizer, other = build(config, [1, 2, 3, 4], None)
        with torch.no_grad():
            model.norm.weight[2] = float("inf")
        broken = {name: weight.clone() for name, weight in model.worker_weights(2).items()}
        for step, rate in enumerate(RATES):
            set_learning_rate(optimizer, rate)
            set_learning_rate(other_optimizer, rate)
            said, expected = update(random_batch(config, step)), other(random_batch(config, step))
            assert said.loss.isfinite().tolist() == [True, True, False, True]
            for worker in (0, 1, 3):
                assert said.loss[worker] == expected.loss[worker]
        for worker in (0, 1, 3):
            for name, weight in whole.worker_weights(worker).items():
                assert torch.equal(model.worker_weights(worker)[name], weight), name
        for name, weight in model.worker_weights(2).items():
            assert torch.equal(weight, broken[name]), name

    @pytest.mark.usefixtures("_fresh_compiler")
    def test_one_graph_serves_all_models_one_by_one(self, config: Config) -> None:
        counters.clear()
        _, _, update = build(config, [1, 2, 3, 4], None, 2, compiled=True, one_by_one=True)
        for step in range(2):
            update(random_batch(config, step))
        assert counters["stats"]["unique_graphs"] == 1


class TestMixed:
    @pytest.mark.parametrize("scheme", ["awc", "atc"])
    @pytest.mark.parametrize(
        ("topology", "models"), [("complete", 4), ("one_peer_ring", 4), ("one_peer_exponential", 4), ("complete", 1)]
    )
    def test_equals_models_of_their_own_that_mix_by_hand(
        self, config: Config, topology: str, models: int, scheme: Scheme
    ) -> None:
        model, optimizer, update = build(config, [42] * models, scheme)
        solos = [initialize(config.model, 42).double() for _ in range(models)]
        optimizers = [build_optimizer(solo, config.optimizer, torch.device("cpu")) for solo in solos]
        for step, rate in enumerate(RATES):
            batch, matrix = random_batch(config, step), mixing_matrix(topology, models, step)
            set_learning_rate(optimizer, rate)
            said = update(batch, torch.from_numpy(matrix))
            expected = by_hand(solos, optimizers, batch, rate, matrix, scheme)
            torch.testing.assert_close(torch.stack([said.loss, said.grad_norm]), expected, rtol=1e-9, atol=0)
            assert_same(model, solos)
        spread = [(weight - weight.mean(0)).norm() for weight in model.parameters()]
        assert (max(spread) < 1e-12) == (models == 1 or (topology, scheme) == ("complete", "atc"))

    def test_the_schemes_differ(self, config: Config) -> None:
        matrix = torch.from_numpy(mixing_matrix("complete", 2, 0))
        ends = []
        for scheme in ("awc", "atc", None):
            model, optimizer, update = build(config, [1, 2], scheme)  # type: ignore[arg-type]
            set_learning_rate(optimizer, 0.01)
            update(random_batch(config, 0), matrix)
            ends.append(model.embedding.weight.detach())
        assert not torch.equal(ends[0], ends[1])
        assert not torch.equal(ends[0], ends[2])
        assert not torch.equal(ends[1], ends[2])

    @pytest.mark.parametrize("scheme", ["awc", "atc"])
    def test_all_stop_with_the_first_that_leaves_the_finite(self, config: Config, scheme: Scheme) -> None:
        model, optimizer, update = build(config, [1, 2, 3], scheme)
        with torch.no_grad():
            model.norm.weight[1] = 1e300
        before = [weight.detach().clone() for weight in model.parameters()]
        matrix = torch.from_numpy(mixing_matrix("complete", 3, 0))
        set_learning_rate(optimizer, 0.01)
        said = update(random_batch(config, 0, rows=6), matrix)
        assert said.grad_norm.isfinite().tolist() == [True, False, True]
        with torch.no_grad():
            model.norm.weight[1] = 1.0
        assert update(random_batch(config, 1, rows=6), matrix).loss.isnan().all()
        before[-1][1] = 1.0
        for weight, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(weight, old)


def by_hand(
    solos: list[Llama],
    optimizers: list[torch.optim.AdamW],
    batch: torch.Tensor,
    rate: float,
    matrix: np.ndarray[Any, Any],
    scheme: Scheme,
) -> torch.Tensor:
    """One update of models that are apart: gradients where each stands, then the scheme; losses and norms [2, N]."""
    said = []
    for worker, solo in enumerate(solos):
        rows = batch[worker :: len(solos)]
        solo.zero_grad()
        loss = solo.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        said.append(torch.stack([loss.detach(), clip_gradients(solo.parameters(), 0.5)]))
    if scheme == "awc":
        mix_by_hand(solos, matrix)
    for optimizer in optimizers:
        set_learning_rate(optimizer, rate)
        optimizer.step()
    if scheme == "atc":
        mix_by_hand(solos, matrix)
    return torch.stack(said, dim=1)


def mix_by_hand(solos: list[Llama], matrix: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        for weights in zip(*(solo.parameters() for solo in solos), strict=True):
            before = [weight.clone() for weight in weights]
            for worker, weight in enumerate(weights):
                weight.zero_()
                for other, share in zip(before, matrix[worker], strict=True):
                    weight.add_(other, alpha=float(share))
