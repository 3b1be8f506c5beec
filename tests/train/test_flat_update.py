"""Whole updates over flat buffers against those with PyTorch's optimizer, which have tests against a plain loop."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from flat_kernels import DEVICE, runnable
from one_layer import one_layer
from poison import FAULTS, HARMED, assert_bit_equal, check_guard, poison, random_batch, state_of, weights_of

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.flat_optimizer import FlatAdamW
from tinyllm_ray.train.flat_update import FlatUpdate
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.trainer import Trainer, choose_device
from tinyllm_ray.train.update import Statistics, Update

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


RATES = (0.0, 0.01, 0.03, 0.002)

on_a_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="these compare what the CPU computes in float32")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


@pytest.fixture
def config(tiny: MakeConfig) -> Config:
    """Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
    return tiny(optimizer={"gradient_clip": 0.5, "eps": 0.01})


def changed(config: Config, section: str, **settings: object) -> Config:
    values = config.model_dump(mode="json")
    values[section] |= settings
    return Config.model_validate(values)


def build_flat(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Llama, FlatUpdate]:
    model = initialize(config.model, config.training.seed).to(DEVICE, dtype)
    return model, FlatUpdate(model, config)


def build_torch(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Llama, Update]:
    model = initialize(config.model, config.training.seed).to(DEVICE, dtype)
    return model, Update(model, build_optimizer(model, config.optimizer, DEVICE), config)


def build_poisoned(
    config: Config, harm: str, at: int, row: int = 7, device: torch.device = DEVICE
) -> tuple[Llama, FlatAdamW, FlatUpdate]:
    model = initialize(config.model, config.training.seed).to(device)
    poison(model, harm, random_batch(config, at).to(device)[row, :-1])
    update = FlatUpdate(model, config)
    return model, update.optimizer, update


def batch_of(config: Config, seed: int = 0) -> torch.Tensor:
    return random_batch(config, seed).to(DEVICE)


def run(
    build: Callable[..., tuple[Llama, Callable[..., Statistics]]], config: Config, dtype: torch.dtype
) -> list[float]:
    """Losses and norms of an update a rate, and then every weight."""
    model, update = build(config, dtype)
    said = [float(value) for seed, rate in enumerate(RATES) for value in update(batch_of(config, seed), rate)]
    return said + [value for weight in weights_of(model).values() for value in weight.double().flatten().tolist()]


@on_a_cpu
class TestEqualsTheUpdateWithTorch:
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
    @pytest.mark.parametrize("limit", [0.5, None])
    @pytest.mark.parametrize("micro_batch_size", [8, 2])
    def test_losses_norms_and_weights(
        self, config: Config, dtype: torch.dtype, tolerance: float, limit: float | None, micro_batch_size: int
    ) -> None:
        config = changed(config, "optimizer", gradient_clip=limit)
        config = changed(config, "execution", micro_batch_size=micro_batch_size)
        found, expected = run(build_flat, config, dtype), run(build_torch, config, dtype)
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)

    def test_micro_batches_change_nothing(self, config: Config) -> None:
        whole, parts = (changed(config, "execution", micro_batch_size=size) for size in (8, 1))
        found, expected = run(build_flat, parts, torch.float64), run(build_flat, whole, torch.float64)
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-11)

    def test_statistics_stay_as_they_were(self, config: Config) -> None:
        """They are read some updates later."""
        _, update = build_flat(config)
        first = update(batch_of(config, 0), 0.03)
        before = (first.loss.item(), first.grad_norm.item())
        update(batch_of(config, 1), 0.03)
        assert (first.loss.item(), first.grad_norm.item()) == before

    def test_a_batch_of_another_shape_is_refused(self, config: Config) -> None:
        _, update = build_flat(config)
        with pytest.raises(ValueError, match="is no update of 8 rows"):
            update(batch_of(config)[:4], 0.01)

    @pytest.mark.slow
    def test_a_compiled_loss_changes_nothing(self, config: Config, compiler: None) -> None:
        compiled = changed(config, "execution", update="compiled", micro_batch_size=4)
        found, expected = run(build_flat, compiled, torch.float32), run(build_flat, config, torch.float32)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        torch._dynamo.reset()


def test_weights_see_the_rate_of_each_update(config: Config) -> None:
    model, update = build_flat(config)
    fresh = weights_of(model)
    update(batch_of(config, 0), 0.0)
    assert_bit_equal(weights_of(model), fresh)
    update(batch_of(config, 1), 0.01)
    moved = weights_of(model)
    assert not any(torch.equal(weight, fresh[name]) for name, weight in moved.items())
    update(batch_of(config, 2), 0.0)
    assert_bit_equal(weights_of(model), moved)


def test_the_device_part_alone_uses_the_rate_that_was_set(config: Config) -> None:
    """What a graph replays: `run`, after the host's part."""
    model, update = build_flat(config)
    for seed, rate in enumerate((0.01, 0.0, 0.03)):
        before = weights_of(model)
        update.prepare(rate)
        update.run(batch_of(config, seed))
        same = [torch.equal(weight, before[name]) for name, weight in weights_of(model).items()]
        assert not any(same) if rate else all(same)


class TestGuard:
    """A fault leaves everything as it was before it."""

    @pytest.mark.parametrize(("at", "limit"), [(0, None), (1, 0.5)])
    @pytest.mark.parametrize("harm", FAULTS)
    def test_nothing_changes_from_a_fault_on(self, config: Config, harm: str, limit: float | None, at: int) -> None:
        config = changed(config, "optimizer", gradient_clip=limit)
        check_guard(config, harm, at=at, updates=at + 2, device=DEVICE, build=build_poisoned)

    @pytest.mark.parametrize("row", [0, 7])
    def test_one_micro_batch_is_enough(self, config: Config, row: int) -> None:
        config = changed(config, "execution", micro_batch_size=2)
        check_guard(config, "gradient inf", row=row, device=DEVICE, build=build_poisoned)

    def test_a_huge_norm_is_no_fault(self, config: Config) -> None:
        model, optimizer, update = build_poisoned(config, "gradient huge", at=1)
        fresh = state_of(model, optimizer)
        said = [update(batch_of(config, seed), 0.01) for seed in range(3)]
        assert 1e14 < said[1].grad_norm.item() < math.inf
        assert all(math.isfinite(one.loss) for one in said)
        found = state_of(model, optimizer)
        assert found["step of norm.weight"].item() == 3
        assert not torch.equal(found[HARMED], fresh[HARMED])


class TestTrainer:
    """As a run has it."""

    @staticmethod
    def flat(tiny: MakeConfig, **execution: object) -> Config:
        return tiny(execution={"optimizer_kernel": "triton", **execution})

    @on_a_cpu
    @pytest.mark.parametrize("micro_batch_size", [8, 4])
    def test_learns_what_it_learns_with_torch(
        self, tiny: MakeConfig, tiny_cache: TokenCache, micro_batch_size: int
    ) -> None:
        found, expected = [], []
        for losses, kernel in ((found, "triton"), (expected, "torch")):
            execution = {"optimizer_kernel": kernel, "micro_batch_size": micro_batch_size}
            with Trainer(tiny(execution=execution), tiny_cache) as trainer:
                losses.extend(trainer.step().loss.item() for _ in range(30))
        assert found == pytest.approx(expected, rel=1e-6)
        assert found[-1] < 0.9 * found[0]

    def test_evaluation_sees_what_was_learned(self, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
        with Trainer(self.flat(tiny), tiny_cache) as trainer:
            (model,) = trainer.evaluation_models()
            before = weights_of(model)
            for update in range(2):
                trainer.step()
                assert trainer.evaluation_models() == [model] == [trainer.model], f"after update {update}"
            assert not any(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())

    def test_weights_put_back_count_from_the_next_update_on(self, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
        config = self.flat(tiny)
        with Trainer(config, None) as trainer:  # one batch, again and again
            first = trainer.step().loss.item()
            fresh = initialize(config.model, config.training.seed).to(DEVICE)
            for _ in range(10):
                trainer.step()
            assert trainer.read()[0] < 0.99 * first
            trainer.model.load_state_dict(fresh.state_dict())
            assert trainer.step().loss.item() == pytest.approx(first, rel=1e-6)

    def test_updates_follow_the_schedule(self, tiny: MakeConfig) -> None:
        config = self.flat(tiny)
        with Trainer(config, None) as trainer:
            seen = []
            for _ in range(4):
                trainer.step()
                seen.append([group["lr"].item() for group in trainer.optimizer.param_groups])
        expected = [torch.tensor(learning_rate(config, update)).item() for update in range(4)]
        assert seen == [[rate, rate] for rate in expected]

    @on_a_cpu
    def test_without_a_gpu_it_is_refused(self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(ConfigError, match=r"execution\.optimizer_kernel: 'triton' \(a CPU has torch\) needs a GPU"):
            choose_device(self.flat(tiny))
