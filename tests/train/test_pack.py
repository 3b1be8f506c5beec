"""The trainer on packs of models against trainings alone, in float64, over ranges and passes of a small cache."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import one_layer
from small_caches import write_cache
from torch._dynamo.utils import counters

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.packed import PackedLlama, initialize_packed
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.mixing import consensus_weights, mixing_matrix, weaken
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.pack import Pack, check_memory
from tinyllm_ray.train.recipe import learning_rate, solo_config, total_updates
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Update, tag_compile_cache

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

CPU = torch.device("cpu")
UPDATES = 9
"""Of 4 rows a model: 36 rows of an order, where a pass has 21 and a range 6 of them."""
OPTIMIZER = {"gradient_clip": 0.5, "eps": 0.01}
"""Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
VARIANTS = [
    {"seed": 0, "peak_learning_rate": 0.02},
    {"seed": 8, "betas": [0.5, 0.8], "weight_decay": 0.7},
    {"peak_learning_rate": 0.001, "weight_decay": 0.0},
    {},
]
ADAPTIVE = {"consensus_start_fraction": 0.25, "consensus_power": 1}


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    generator = np.random.default_rng(1)
    splits = {"train": generator.integers(61, size=350).tolist(), "validation": [0] * 50}
    return write_cache(tmp_path_factory.mktemp("small"), splits, shard_tokens=50, vocab_size=61)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers in float64, from the weights that they start from in float32."""
    monkeypatch.setattr("tinyllm_ray.train.trainer.initialize", lambda *how: initialize(*how).double())
    monkeypatch.setattr("tinyllm_ray.train.pack.initialize_packed", lambda *how: initialize_packed(*how).double())


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles into PyTorch's own kernels."""
    compile_function = torch.compile

    def compile_anew(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = compile_function(function, backend="aot_eager", fullgraph=True, dynamic=False)
        return compiled

    monkeypatch.setattr(torch, "compile", compile_anew)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=""):
        yield
    torch._dynamo.reset()


def apart(tiny: MakeConfig, models: int, **execution: Any) -> Config:
    """Unmixed models with 4 rows an update each."""
    return tiny(
        optimizer=OPTIMIZER,
        training={"tokens_per_update": 64, "token_budget": 64 * 12, "epochs": 2},
        packing={"models": models, "variants": VARIANTS[:models]},
        execution={"micro_batch_size": 2, **execution},
    )


def mixed(tiny: MakeConfig, models: int, topology: str, scheme: str, **execution: Any) -> Config:
    return tiny(
        optimizer=OPTIMIZER,
        training={"tokens_per_update": 64 * models, "token_budget": 64 * models * 12, "epochs": 2},
        packing={"models": models, "topology": topology, "scheme": scheme, **ADAPTIVE},
        execution={"micro_batch_size": 2, **execution},
    )


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def pack_of(trainer: Trainer) -> PackedLlama:
    assert isinstance(trainer.model, PackedLlama)
    return trainer.model


def assert_same(model: PackedLlama, solos: list[Llama], tolerance: float) -> None:
    for worker, solo in enumerate(solos):
        weights = model.worker_weights(worker)
        for name, expected in solo.named_parameters():
            error = (weights[name] - expected.detach()).norm() / expected.detach().norm()
            assert error < tolerance, f"model {worker}, {name}: {error}"


AT_ONCE, ONE_BY_ONE = {"packed_backward": "at_once"}, {"packed_backward": "one_by_one"}
COMPILED = {"update": "compiled"}


class TestApart:
    @pytest.mark.usefixtures("double", "without_kernels")
    @pytest.mark.parametrize(
        ("models", "how"), [(2, AT_ONCE | COMPILED), (2, ONE_BY_ONE | COMPILED), (4, AT_ONCE), (4, ONE_BY_ONE)]
    )
    def test_every_model_is_step_by_step_its_training_alone(
        self, tiny: MakeConfig, small_cache: TokenCache, models: int, how: dict[str, str]
    ) -> None:
        config = apart(tiny, models, **how)
        compare(config, small_cache, 1e-9)

    @pytest.mark.parametrize("how", [AT_ONCE, ONE_BY_ONE])
    def test_so_it_is_in_float32(self, tiny: MakeConfig, small_cache: TokenCache, how: dict[str, str]) -> None:
        compare(apart(tiny, 4, **how), small_cache, 1e-5)

    @pytest.mark.usefixtures("double")
    def test_models_with_rates_alike_have_their_variants(self, tiny: MakeConfig, small_cache: TokenCache) -> None:
        """The recipe's own peak is none of theirs."""
        config = apart(tiny, 2)
        variants = [{"seed": seed, "peak_learning_rate": 0.03} for seed in (1, 2)]
        values = config.model_dump(mode="json") | {"packing": {"models": 2, "variants": variants}}
        compare(Config.model_validate(values), small_cache, 1e-9, updates=3)

    def test_one_that_leaves_the_finite_stops_alone(self, tiny: MakeConfig, small_cache: TokenCache) -> None:
        config = apart(tiny, 4)
        with Trainer(config, small_cache) as harmed, Trainer(config, small_cache) as whole:
            harmed.step()
            whole.step()
            with torch.no_grad():
                pack_of(harmed).norm.weight[1] = math.inf
            before = {name: weight.clone() for name, weight in pack_of(harmed).worker_weights(1).items()}
            for _ in range(3):
                said, expected = harmed.step(), whole.step()
                assert said.loss.isfinite().tolist() == [True, False, True, True]
                for worker in (0, 2, 3):
                    assert said.loss[worker] == expected.loss[worker]
                assert all(map(math.isnan, harmed.read())), "what harms one model is not to be believed"
            for worker in (0, 2, 3):
                for name, weight in pack_of(whole).worker_weights(worker).items():
                    assert torch.equal(pack_of(harmed).worker_weights(worker)[name], weight), name
            for name, weight in pack_of(harmed).worker_weights(1).items():
                assert torch.equal(weight, before[name]), name

    def test_each_has_the_rate_of_its_own_peak(self, tiny: MakeConfig) -> None:
        config = apart(tiny, 4)
        with Trainer(config, None) as trainer:
            for update in range(3):
                trainer.step()
                rates = [learning_rate(solo_config(config, worker), update) for worker in range(4)]
                for group in trainer.optimizer.param_groups:
                    assert torch.equal(group["lr"], torch.tensor(rates, dtype=torch.float32))


def compare(config: Config, cache: TokenCache, tolerance: float, updates: int = UPDATES) -> None:
    """A pack beside its trainings alone."""
    models = config.packing.models
    with ExitStack() as opened:
        trainer = opened.enter_context(Trainer(config, cache))
        solos = [opened.enter_context(Trainer(solo_config(config, worker), cache)) for worker in range(models)]
        for _ in range(updates):
            said = trainer.step()
            assert said.loss.shape == said.grad_norm.shape == (models,)
            for worker, solo in enumerate(solos):
                expected = solo.step()
                assert said.loss[worker].item() == pytest.approx(expected.loss.item(), rel=tolerance)
                assert said.grad_norm[worker].item() == pytest.approx(expected.grad_norm.item(), rel=tolerance)
            assert_same(pack_of(trainer), [solo.evaluation_models()[0] for solo in solos], tolerance)
            assert trainer.feed.position == solos[0].feed.position
        assert trainer.read() == pytest.approx((said.loss.mean().item(), said.grad_norm.mean().item()))
        assert trainer.targets_per_update == models * solos[0].targets_per_update


class TestMixed:
    @pytest.mark.usefixtures("double", "without_kernels")
    @pytest.mark.parametrize(
        ("topology", "models", "scheme", "how"),
        [
            ("one_peer_exponential", 4, "awc", AT_ONCE),
            ("one_peer_exponential", 4, "atc", ONE_BY_ONE),
            ("one_peer_ring", 3, "atc", AT_ONCE),
            ("one_peer_ring", 3, "awc", ONE_BY_ONE),
            ("complete", 2, "awc", AT_ONCE | COMPILED),
            ("complete", 2, "awc", ONE_BY_ONE | COMPILED),
        ],
    )
    def test_equals_trainings_alone_that_mix_by_hand(
        self, tiny: MakeConfig, small_cache: TokenCache, topology: str, models: int, scheme: str, how: dict[str, str]
    ) -> None:
        config = mixed(tiny, models, topology, scheme, **how)
        by_hand = ByHand(config, small_cache)
        with Trainer(config, small_cache) as trainer:
            assert trainer.targets_per_update == 64 * models
            for update in range(6):
                said, expected = trainer.step(), by_hand.step(update)
                torch.testing.assert_close(torch.stack(said), expected, rtol=1e-9, atol=0)
                assert_same(pack_of(trainer), by_hand.models, 1e-9)

    @pytest.mark.parametrize("scheme", ["awc", "atc"])
    def test_all_stop_with_the_first_that_leaves_the_finite(
        self, tiny: MakeConfig, small_cache: TokenCache, scheme: str
    ) -> None:
        with Trainer(mixed(tiny, 4, "complete", scheme), small_cache) as trainer:
            trainer.step()
            with torch.no_grad():
                pack_of(trainer).norm.weight[2] = 1e38
            before = weights_of(trainer)
            assert trainer.step().grad_norm.isfinite().tolist() == [True, True, False, True]
            assert all(map(torch.equal, before, weights_of(trainer)))
            with torch.no_grad():
                pack_of(trainer).norm.weight[2] = 1.0
            before = weights_of(trainer)
            assert trainer.step().loss.isnan().all()
            assert math.isnan(trainer.read()[0])
            assert all(map(torch.equal, before, weights_of(trainer)))

    def test_all_start_from_the_same(self, tiny: MakeConfig) -> None:
        pack = Pack(mixed(tiny, 4, "complete", "awc"), CPU)
        for weight in pack.model.parameters():
            assert torch.equal(weight, weight[:1].expand_as(weight))


class ByHand:
    """Trainings alone on every Nth row of one order; after each update they mix.

    AdamW's step does not depend on where it starts but for the decay, so that averaging before it (awc) is what
    averaging adds to the weights before it, decayed as they are, added to those after it.
    """

    def __init__(self, config: Config, cache: TokenCache) -> None:
        models = config.packing.models
        values = config.model_dump(mode="json", exclude={"packing"})
        values["training"]["tokens_per_update"] //= models
        values["execution"]["update"] = "eager"
        alone = Config.model_validate(values)
        self.models = [initialize(alone.model, alone.training.seed).double() for _ in range(models)]
        self._updates = [Update(model, build_optimizer(model, alone.optimizer, CPU), alone) for model in self.models]
        self._loader = RowLoader(cache, context=16, seed=42)
        self._config = config
        rates = [learning_rate(config, update) for update in range(total_updates(config))]
        self._consensus = consensus_weights(rates, 0.25, 1)

    def step(self, update: int) -> torch.Tensor:
        """Losses and norms, [2, N]."""
        packing, models = self._config.packing, len(self.models)
        assert packing.topology is not None
        matrix = weaken(mixing_matrix(packing.topology, models, update), self._consensus[update])
        rate = torch.tensor(learning_rate(self._config, update)).item()  # as float32 has it
        batch = torch.from_numpy(self._loader.next(4 * models).astype(np.int64))
        before = [stack(weights) for weights in self._weights()]
        said = [run(batch[worker::models], rate) for worker, run in enumerate(self._updates)]
        for old, weights in zip(before, self._weights(), strict=True):
            decay = 0.1 if old.ndim > 2 else 0.0
            mixing = torch.from_numpy(matrix)
            after = stack(weights)
            if packing.scheme == "awc":
                after += (torch.tensordot(mixing, old, 1) - old) * (1 - rate * decay)
            else:
                after = torch.tensordot(mixing, after, 1)
            for weight, value in zip(weights, after, strict=True):
                weight.data.copy_(value)
        return torch.stack([torch.stack([one.loss for one in said]), torch.stack([one.grad_norm for one in said])])

    def _weights(self) -> list[tuple[torch.nn.Parameter, ...]]:
        return list(zip(*(model.parameters() for model in self.models), strict=True))


def stack(weights: tuple[torch.nn.Parameter, ...]) -> torch.Tensor:
    return torch.stack([weight.detach() for weight in weights])


class TestEither:
    @pytest.fixture(params=["apart", "mixed"])
    def config(self, request: pytest.FixtureRequest, tiny: MakeConfig) -> Config:
        return apart(tiny, 4) if request.param == "apart" else mixed(tiny, 4, "one_peer_exponential", "awc")

    @pytest.mark.parametrize(("done", "backward"), [(1, AT_ONCE), (5, ONE_BY_ONE)])
    def test_goes_on_from_a_checkpoint_as_the_unbroken_one(
        self, config: Config, small_cache: TokenCache, done: int, backward: dict[str, str], tmp_path: Path
    ) -> None:
        """From any update: rows, rates, topology and consensus follow from their number."""
        config = config.with_execution(backward)
        with Trainer(config, small_cache) as unbroken:
            for _ in range(done):
                unbroken.step()
            identity = small_cache.identity
            folder = save_checkpoint(tmp_path, done, unbroken.model, unbroken.optimizer, {}, config, identity)
            checkpoint = open_checkpoint(folder)
            with Trainer(config, small_cache, updates=done) as resumed:
                checkpoint.load_weights(resumed.model)
                checkpoint.load_training(resumed.model, resumed.optimizer)
                for _ in range(3):
                    assert torch.equal(torch.stack(resumed.step()), torch.stack(unbroken.step()))
                assert all(map(torch.equal, weights_of(resumed), weights_of(unbroken)))

    @pytest.mark.parametrize("backward", ["at_once", "one_by_one"])
    def test_equal_runs_give_equal_bits(self, config: Config, small_cache: TokenCache, backward: str) -> None:
        asked = config.with_execution({"deterministic": True, "packed_backward": backward})
        found = []
        for _ in range(2):
            with Trainer(asked, small_cache) as trainer:
                found.append([*(torch.stack(trainer.step()) for _ in range(4)), *weights_of(trainer)])
        assert all(map(torch.equal, *found))

    @pytest.mark.usefixtures("without_kernels")
    @pytest.mark.parametrize("backward", ["at_once", "one_by_one"])
    def test_is_traced_once_and_never_again(self, config: Config, backward: str) -> None:
        compiled = config.with_execution({"update": "compiled", "packed_backward": backward})
        with Trainer(compiled, None) as trainer:
            for _ in range(3):
                trainer.step()
            assert counters["stats"]["unique_graphs"] == 1
            with pytest.raises(RuntimeError, match="Detected recompile"):
                trainer._trainee.step(trainer.feed.next().t().contiguous().t(), 3)  # laid out otherwise

    @pytest.mark.parametrize("shape", [(15, 17), (16, 16), (4, 17)])
    def test_a_batch_of_another_shape_is_refused(self, config: Config, shape: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=r"no update of 16 rows of 16 \+ 1 tokens"):
            Pack(config, CPU).step(torch.zeros(shape, dtype=torch.int64), 0)

    def test_runs_on_a_synthetic_batch(self, config: Config) -> None:
        with Trainer(config, None) as trainer:
            assert all(map(math.isnan, trainer.read()))
            assert trainer.step().loss.isfinite().all()
            assert trainer.feed.next().shape == (16, 17)
            assert trainer.targets_per_update == 256


class TestMemory:
    def test_more_models_than_the_device_can_hold_are_refused_before_any_is_made(self, tiny: MakeConfig) -> None:
        huge = apart(tiny, 2).model_copy(update={"model": ModelConfig(layers=24, width=2**16, heads=16, ffn=2**18)})
        with pytest.raises(ConfigError, match=r"packing.models 2: .* GB, the device has .* GB; take 1 or fewer"):
            Pack(huge, CPU)

    def test_as_many_as_fit_are_let_through(self, tiny: MakeConfig) -> None:
        config = apart(tiny, 4)
        each = 16 * config.model.parameters
        check_memory(config, 4 * each)
        with pytest.raises(ConfigError, match="take 3 or fewer"):
            check_memory(config, 4 * each - 1)


class TestEvaluationModels:
    def test_of_mixed_models_is_their_average_in_one_place(self, tiny: MakeConfig) -> None:
        with Trainer(mixed(tiny, 4, "one_peer_ring", "atc"), None) as trainer:
            (model,) = trainer.evaluation_models()
            places = [weight.data_ptr() for weight in model.parameters()]
            for _ in range(2):
                trainer.step()
                (again,) = trainer.evaluation_models()
                assert again is model
                assert [weight.data_ptr() for weight in model.parameters()] == places
                for weight, packed in zip(model.parameters(), pack_of(trainer).parameters(), strict=True):
                    torch.testing.assert_close(weight, packed.mean(0))
                    assert not torch.equal(packed[0], packed[2])
            expected = initialize(model.config, 1)
            expected.load_state_dict(model.state_dict())
            tokens = torch.arange(32).view(2, 16)
            assert torch.equal(model(tokens), expected(tokens)), "its rotary tables are there"

    def test_of_models_apart_are_themselves(self, tiny: MakeConfig) -> None:
        with Trainer(apart(tiny, 2), None) as trainer:
            models = trainer.evaluation_models()
            trainer.step()
            assert [id(model) for model in trainer.evaluation_models()] == [id(model) for model in models]
            tokens = torch.arange(32).view(2, 16)
            together = pack_of(trainer)(tokens.expand(2, 2, 16))
            for worker, model in enumerate(models):
                torch.testing.assert_close(model(tokens), together[worker])

    def test_of_one_model_is_itself(self, tiny: MakeConfig) -> None:
        with Trainer(tiny(), None) as trainer:
            assert trainer.evaluation_models() == [trainer.model]

    @pytest.mark.usefixtures("without_kernels")
    @pytest.mark.parametrize("pack", ["apart", "mixed"])
    def test_are_not_compiled_anew(self, tiny: MakeConfig, pack: str) -> None:
        config = apart(tiny, 2) if pack == "apart" else mixed(tiny, 2, "complete", "awc")
        with Trainer(config, None) as trainer, torch.no_grad():
            compiled = [torch.compile(model.hidden) for model in trainer.evaluation_models()]
            found = []
            for _ in range(2):
                with torch.enable_grad():
                    trainer.step()
                trainer.evaluation_models()
                found.append(torch.stack([hidden(torch.arange(32).view(2, 16)) for hidden in compiled]))
        assert not torch.equal(found[0], found[1])
        assert counters["stats"]["unique_graphs"] == 1


class TestCompileCacheTag:
    @pytest.fixture(autouse=True)
    def _keep_tag(self) -> Iterator[None]:
        with torch.compiler.config.patch(cache_key_tag=""):
            yield

    def test_each_way_backward_has_its_own(self, tiny: MakeConfig) -> None:
        ways = [AT_ONCE, ONE_BY_ONE, {}]
        *tags, default = [tag_compile_cache(apart(tiny, 2, **COMPILED, **way)) for way in ways]
        assert len({*tags, tag_compile_cache(tiny(execution=COMPILED))}) == 3
        assert default == tags[0], "micro-batches are small here"

    @pytest.mark.parametrize("backward", ["at_once", "one_by_one"])
    def test_where_there_is_one_model_it_is_the_same(self, tiny: MakeConfig, backward: str) -> None:
        asked = tiny(execution={"update": "compiled", "packed_backward": backward})
        assert tag_compile_cache(asked) == tag_compile_cache(tiny(execution={"update": "compiled"}))
