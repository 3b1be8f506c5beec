"""The trainer on tokens and on one synthetic batch."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.trainer import Solo, Trainer, draw_model, settle_threads

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")


def losses(config: Config, cache: TokenCache | None, updates: int) -> list[float]:
    with Trainer(config, cache) as trainer:
        return [trainer.step().loss.item() for _ in range(updates)]


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize(
    "execution", [{"micro_batch_size": 1}, {"prefetch_depth": 0}, {"prefetch_depth": 3}, {"sdpa_backend": "math"}]
)
def test_the_execution_changes_nothing_that_is_learned(
    tiny: MakeConfig, tiny_cache: TokenCache, real: bool, execution: dict[str, object]
) -> None:
    cache = tiny_cache if real else None
    expected = losses(tiny(), cache, 6)
    assert losses(tiny(execution=execution), cache, 6) == pytest.approx(expected, rel=1e-5)
    assert losses(tiny(training={"seed": 43}), cache, 6) != pytest.approx(expected, rel=1e-3)


def test_learns_from_tokens(tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    found = losses(tiny(), tiny_cache, 100)
    assert found[0] == pytest.approx(math.log(61), abs=0.5)
    assert sum(found[-10:]) / 10 < 0.6 * found[0]


def test_updates_follow_the_schedule(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    with Trainer(config, None) as trainer:
        seen = []
        for _ in range(8):
            trainer.step()
            seen.append([group["lr"].item() for group in trainer.optimizer.param_groups])
    expected = [torch.tensor(learning_rate(config, update)).item() for update in range(8)]
    assert seen == [[rate, rate] for rate in expected]


def test_is_read_after_the_last_update(tiny: MakeConfig) -> None:
    with Trainer(tiny(), None) as trainer:
        assert all(map(math.isnan, trainer.read()))
        trainer.step()
        said = trainer.step()
        trainer.synchronize()
        assert trainer.read() == (said.loss.item(), said.grad_norm.item())
        assert (trainer.updates, trainer.targets_per_update) == (2, 128)


def test_the_synthetic_batch_stays(tiny: MakeConfig) -> None:
    with Trainer(tiny(), None) as trainer:
        first, second = trainer.feed.next(), trainer.feed.next()
        assert torch.equal(first, second)
        assert first.shape == (8, 17)
        assert first.unique().numel() > 30, "zeros alone would run faster than tokens"
        assert trainer.data_wait_seconds == 0.0


def test_start_is_told_by_stage(tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    with Trainer(tiny(), tiny_cache) as trainer:
        assert set(trainer.stage_seconds) == {"runtime", "model_and_optimizer", "loader"}
        assert all(seconds >= 0 for seconds in trainer.stage_seconds.values())


def test_weights_that_are_drawn_beside_the_devices_start_are_the_same(tiny: MakeConfig) -> None:
    """In a thread of their own, whatever the other draws and sets meanwhile."""
    with ThreadPoolExecutor(1) as beside, torch.device("meta"), torch.inference_mode():
        drawn = beside.submit(draw_model, tiny()).result()
    torch.manual_seed(1)
    solo, other = Solo(tiny(), torch.device("cpu"), drawn), Solo(tiny(), torch.device("cpu"))
    assert solo.model is drawn
    assert all(map(torch.equal, solo.model.state_dict().values(), other.model.state_dict().values()))
    rows = torch.arange(8 * 17).reshape(8, 17) % 61
    assert solo.step(rows, 0).loss.item() == other.step(rows, 0).loss.item()
    assert all(map(torch.equal, solo.model.state_dict().values(), other.model.state_dict().values()))


def test_a_cache_with_more_ids_than_the_model_is_refused(tiny: MakeConfig, tiny_cache: TokenCache) -> None:
    with pytest.raises(ConfigError, match=r"set model\.vocab_size=61"):
        Trainer(tiny(model={"vocab_size": 60}), tiny_cache)


class TestDeterminism:
    """Promised where the execution asks for it, and gone with the trainer."""

    @pytest.fixture(autouse=True)
    def _settings(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        assert not torch.are_deterministic_algorithms_enabled()
        yield
        torch.use_deterministic_algorithms(False)

    def test_equal_runs_give_equal_bits(self, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
        config = tiny(execution={"deterministic": True})
        found = []
        for _ in range(2):
            with Trainer(config, tiny_cache) as trainer:
                seen = [trainer.step().loss for _ in range(12)]
            found.append((torch.stack(seen), [weight.detach() for weight in trainer.model.parameters()]))
        assert torch.equal(found[0][0], found[1][0])
        assert all(map(torch.equal, found[0][1], found[1][1]))
        assert found[0][0].tolist() == pytest.approx(losses(tiny(), tiny_cache, 12), rel=1e-5)

    def test_the_next_trainer_does_not_inherit_it(self, tiny: MakeConfig) -> None:
        with Trainer(tiny(execution={"deterministic": True}), None):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        unclosed = Trainer(tiny(execution={"deterministic": True}), None)
        with Trainer(tiny(), None):
            assert not torch.are_deterministic_algorithms_enabled()
        unclosed.close()

    def test_a_start_that_fails_leaves_nothing(self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **keywords: object) -> None:
            raise MemoryError

        monkeypatch.setattr("tinyllm_ray.train.trainer.SyntheticFeed", fail)
        with pytest.raises(MemoryError):
            Trainer(tiny(execution={"deterministic": True}), None)
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ

    def test_what_the_process_had_comes_back(self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with Trainer(tiny(), None):
            assert not torch.are_deterministic_algorithms_enabled()
        with Trainer(tiny(execution={"deterministic": True}), None):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

    @pytest.mark.parametrize("update", ["compiled", "graph"])
    def test_a_compiler_that_goes_by_timing_is_refused(
        self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, update: str
    ) -> None:
        monkeypatch.setattr("torch._inductor.config", SimpleNamespace())  # as torch 2.9 has it
        compiled = tiny(execution={"deterministic": True, "update": update})
        with pytest.raises(ConfigError, match=r"set execution\.update=eager"):
            Trainer(compiled, None)
        assert not torch.are_deterministic_algorithms_enabled()

    def test_an_operator_that_cannot_promise_it_is_an_error(self, tiny: MakeConfig) -> None:
        with Trainer(tiny(execution={"deterministic": True}), None), pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


class TestThreads:
    def test_are_those_asked_for(self, tiny: MakeConfig) -> None:
        before = torch.get_num_threads()
        with Trainer(tiny(execution={"cpu_threads": 2}), None) as trainer:
            assert trainer.threads == torch.get_num_threads() == 2
        torch.set_num_threads(before)

    def test_are_every_usable_core_by_default(self, tiny: MakeConfig) -> None:
        assert settle_threads(tiny(execution={"cpu_threads": None}), torch.device("cpu")) == usable_cores()

    def test_are_at_most_eight_beside_a_gpu(self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tinyllm_ray.train.trainer.usable_cores", lambda: 72)
        config = tiny(execution={"cpu_threads": None})
        assert settle_threads(config, torch.device("cuda")) == 8
        assert settle_threads(config, torch.device("cpu")) == 72
