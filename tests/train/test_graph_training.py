"""Trainings whose updates are captured, with operators recorded on the CPU in the place of a CUDA graph."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import one_layer
from poison import poison, random_batch, state_of
from runs import learned
from tape import TapeCapture
from torch._dynamo.utils import counters

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.diagnosis import explain_fault
from tinyllm_ray.train.evaluate import Evaluator
from tinyllm_ray.train.graph_update import WARM_UP_UPDATES
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.run import Run
from tinyllm_ray.train.trainer import Solo, Trainer

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


CPU = torch.device("cpu")
UPDATES = WARM_UP_UPDATES + 6
"""Twice through every matrix of the mixing, from either side of the capture."""

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


@pytest.fixture
def on_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers on the CPU that capture on a tape."""
    monkeypatch.setattr("tinyllm_ray.train.graph_update.CudaCapture", TapeCapture)
    monkeypatch.setattr("tinyllm_ray.train.trainer.choose_device", lambda config: CPU)


@pytest.fixture
def taped(on_tape: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code inside stays eager."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def compiling(on_tape: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loss is compiled into PyTorch's own kernels."""
    compile_function = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **_: compile_function(function, backend="aot_eager", fullgraph=True, dynamic=False),
    )
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=""):
        yield
    torch._dynamo.reset()


OPTIMIZER = {"gradient_clip": 0.5, "eps": 0.01}
"""Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
VARIANTS = [{"seed": 1, "peak_learning_rate": 0.03}, {"seed": 2}, {"weight_decay": 0.7}]
MIXED = {"topology": "one_peer_ring", "consensus_start_fraction": 0.25, "consensus_power": 1}


def solo(tiny: MakeConfig, **execution: Any) -> Config:
    return tiny(optimizer=OPTIMIZER, execution={"update": "graph", **execution})


def packed(tiny: MakeConfig, packing: dict[str, Any], **execution: Any) -> Config:
    """Three models of four rows each, whose mixing matrices repeat after three updates and fade with the rate."""
    rows = 12 if packing.get("topology") else 4
    return tiny(
        optimizer=OPTIMIZER,
        training={"tokens_per_update": 16 * rows, "token_budget": 16 * rows * 12, "epochs": 2},
        packing={"models": 3, **packing},
        execution={"update": "graph", "micro_batch_size": 2, **execution},
    )


def everything(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, moments, step counters and guards, in the order of the parameters."""
    optimizer = trainer.optimizer
    states = [optimizer.state[weight] for weight in trainer.model.parameters()]
    held = [state[key] for state in states for key in sorted(state)]
    return [value.detach().clone() for value in (*trainer.model.parameters(), *held)]


def train(config: Config, cache: TokenCache | None, updates: int = UPDATES) -> list[torch.Tensor]:
    with Trainer(config, cache) as trainer:
        said = [torch.stack(trainer.step()) for _ in range(updates)]
        assert trainer.feed.position == (updates * config.rows_per_update if cache else 0)
        return [*said, *everything(trainer)]


def assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    differing = [at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if not torch.equal(one, other)]
    assert differing == []


@pytest.mark.usefixtures("taped")
class TestTraining:
    """Equal bits: the operators are the same, only their order in time is another."""

    @pytest.mark.parametrize("micro_batch_size", [1, 4, 8])
    @pytest.mark.parametrize("real", [True, False])
    def test_one_model_trains_as_uncaptured(
        self, tiny: MakeConfig, tiny_cache: TokenCache, micro_batch_size: int, real: bool
    ) -> None:
        config = solo(tiny, micro_batch_size=micro_batch_size)
        cache = tiny_cache if real else None
        assert_equal_bits(train(config, cache), train(config.with_execution({"update": "compiled"}), cache))

    @pytest.mark.parametrize("settings", [{"gradient_clip": None}, {"gradient_clip": 0.5, "betas": [0.5, 0.6]}])
    def test_so_it_does_under_another_optimizer(
        self, tiny: MakeConfig, tiny_cache: TokenCache, settings: dict[str, Any]
    ) -> None:
        config = tiny(optimizer=settings, execution={"update": "graph"})
        assert_equal_bits(train(config, tiny_cache), train(config.with_execution({"update": "compiled"}), tiny_cache))

    @pytest.mark.parametrize("packing", [{"variants": VARIANTS}, MIXED | {"scheme": "awc"}, MIXED | {"scheme": "atc"}])
    @pytest.mark.parametrize("backward", ["at_once", "one_by_one"])
    def test_packs_train_as_uncaptured(
        self, tiny: MakeConfig, tiny_cache: TokenCache, packing: dict[str, Any], backward: str
    ) -> None:
        config = packed(tiny, packing, packed_backward=backward)
        assert_equal_bits(train(config, tiny_cache), train(config.with_execution({"update": "compiled"}), tiny_cache))

    def test_the_schedule_reaches_every_update(self, tiny: MakeConfig) -> None:
        """A graph that froze a rate would move weights where the rate is 0."""
        config = solo(tiny)
        trainee = Solo(config, CPU)
        ids = random_batch(config).to(torch.uint16)
        for rate in (0.0, 0.01, 0.0, 0.02, 0.0, 0.01, 0.0):
            before = [weight.detach().clone() for weight in trainee.model.parameters()]
            for group in trainee.optimizer.param_groups:
                group["lr"].fill_(rate)
            trainee.run(ids)
            moved = [not torch.equal(one, two) for one, two in zip(before, trainee.model.parameters(), strict=True)]
            assert set(moved) == {rate > 0}

    def test_rates_are_those_of_the_recipe(self, tiny: MakeConfig) -> None:
        config = solo(tiny)
        with Trainer(config, None) as trainer:
            for update in range(UPDATES):
                trainer.step()
                expected = torch.tensor(learning_rate(config, update))
                assert all(group["lr"] == expected for group in trainer.optimizer.param_groups)

    def test_a_batch_of_another_shape_is_refused(self, tiny: MakeConfig) -> None:
        trainee = Solo(solo(tiny), CPU)
        with pytest.raises(ValueError, match=r"no update of 8 rows of 16 \+ 1 tokens"):
            trainee.step(torch.zeros((1, 17), dtype=torch.uint16), 0)

    def test_a_trainer_that_closes_gives_the_graph_back(self, tiny: MakeConfig) -> None:
        with Trainer(solo(tiny), None) as trainer:
            for _ in range(UPDATES):
                trainer.step()
            capture = trainer._trainee.run._capture  # type: ignore[union-attr]
            assert isinstance(capture, TapeCapture)
            assert capture.log.count("capture") == 1
        assert capture.log[-1] == "reset"


@pytest.mark.usefixtures("taped")
class TestGuard:
    """From a fault on everything stays as it was before it, whichever side of the capture it falls on."""

    @pytest.mark.parametrize("harm", ["loss nan", "gradient inf"])
    @pytest.mark.parametrize("at", [1, WARM_UP_UPDATES, WARM_UP_UPDATES + 2])
    def test_a_fault_changes_nothing(
        self, tiny: MakeConfig, harm: str, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = solo(tiny)
        marker = random_batch(config, at)[7, :-1]
        monkeypatch.setattr("tinyllm_ray.train.trainer.initialize", lambda *how: poison(initialize(*how), harm, marker))
        trainee = Solo(config, CPU)
        states, said = [], []
        for update in range(at + 3):
            states.append(state_of(trainee.model, trainee.optimizer))
            said.append(trainee.step(random_batch(config, update).to(torch.uint16), update + 1))
        assert [math.isfinite(one.loss) and math.isfinite(one.grad_norm) for one in said] == [
            update < at for update in range(at + 3)
        ]
        assert all(math.isnan(one.loss) for one in said[at + 1 :])
        assert trainee._update.stopped.item() == 1.0
        found = state_of(trainee.model, trainee.optimizer)
        assert [name for name, value in states[at].items() if not torch.equal(found[name], value)] == []

    @pytest.mark.parametrize("at", [1, WARM_UP_UPDATES + 1])
    def test_a_model_of_a_pack_stops_alone(self, tiny: MakeConfig, tiny_cache: TokenCache, at: int) -> None:
        config = packed(tiny, {"variants": VARIANTS})
        with Trainer(config, tiny_cache) as harmed, Trainer(config, tiny_cache) as whole:
            for update in range(UPDATES):
                if update == at:
                    with torch.no_grad():
                        harmed.model.norm.weight[1] = math.inf  # type: ignore[index]
                said, expected = harmed.step(), whole.step()
                assert said.loss.isfinite().tolist() == [True, update < at, True]
                assert torch.equal(said.loss[[0, 2]], expected.loss[[0, 2]])


@pytest.mark.usefixtures("taped")
class TestInBetween:
    @pytest.mark.parametrize("after", [1, WARM_UP_UPDATES, WARM_UP_UPDATES + 2])
    def test_evaluations_and_checkpoints_disturb_nothing(
        self, tiny: MakeConfig, tiny_cache: TokenCache, after: int, tmp_path: Path
    ) -> None:
        for config in (solo(tiny), packed(tiny, MIXED | {"scheme": "atc"})):
            expected = train(config, tiny_cache)
            with Trainer(config, tiny_cache) as trainer:
                evaluator = Evaluator(trainer.evaluation_models()[0], config, CPU)
                found, losses = [], []
                for update in range(UPDATES):
                    found.append(torch.stack(trainer.step()))
                    if update + 1 >= after:
                        trainer.evaluation_models()
                        losses.append(evaluator.evaluate([np.arange(34).reshape(2, 17)])[0])
                        save(trainer, tmp_path, tiny_cache)
                assert_equal_bits([*found, *everything(trainer)], expected)
                assert len(set(losses)) == len(losses), "it sees the weights of every update"

    @pytest.mark.parametrize("done", [1, WARM_UP_UPDATES + 2])
    def test_goes_on_from_a_checkpoint_as_the_unbroken_one(
        self, tiny: MakeConfig, tiny_cache: TokenCache, done: int, tmp_path: Path
    ) -> None:
        for config in (solo(tiny), packed(tiny, MIXED | {"scheme": "awc"})):
            with Trainer(config, tiny_cache) as unbroken, Trainer(config, tiny_cache, updates=done) as resumed:
                for _ in range(done):
                    unbroken.step()
                restore(resumed, save(unbroken, tmp_path, tiny_cache))
                for _ in range(WARM_UP_UPDATES + 2):
                    assert torch.equal(torch.stack(resumed.step()), torch.stack(unbroken.step()))
                assert_equal_bits(everything(resumed), everything(unbroken))

    def test_a_captured_update_reads_what_is_restored(
        self, tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path
    ) -> None:
        """Weights and moments are filled where they are."""
        for config in (solo(tiny), packed(tiny, MIXED | {"scheme": "awc"})):
            with Trainer(config, tiny_cache) as unbroken, Trainer(config, tiny_cache) as other:
                for _ in range(UPDATES):
                    unbroken.step()
                    other.step()
                with torch.no_grad():
                    for weight in other.model.parameters():
                        weight.mul_(1.1)
                        other.optimizer.state[weight]["exp_avg_sq"].mul_(2)
                restore(other, save(unbroken, tmp_path, tiny_cache))
                for _ in range(2):
                    assert torch.equal(torch.stack(other.step()), torch.stack(unbroken.step()))
                assert_equal_bits(everything(other), everything(unbroken))


def save(trainer: Trainer, folder: Path, cache: TokenCache) -> Path:
    out = folder / str(trainer.config.packing.models)
    out.mkdir(exist_ok=True)
    return save_checkpoint(out, trainer.updates, trainer.model, trainer.optimizer, {}, trainer.config, cache.identity)


def restore(trainer: Trainer, folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.load_weights(trainer.model)
    checkpoint.load_training(trainer.model, trainer.optimizer)


@pytest.mark.usefixtures("compiling")
class TestCompiledInside:
    @pytest.mark.parametrize("kind", ["solo", "at_once", "one_by_one"])
    def test_is_traced_once_and_trains_as_uncaptured(self, tiny: MakeConfig, tiny_cache: TokenCache, kind: str) -> None:
        config = solo(tiny) if kind == "solo" else packed(tiny, {"variants": VARIANTS}, packed_backward=kind)
        config = config.model_copy(update={"model": config.model.model_copy(update={"layers": 1})})
        found = train(config, tiny_cache)
        assert counters["stats"]["unique_graphs"] == 1
        assert_equal_bits(found, train(config.with_execution({"update": "compiled"}), tiny_cache))


@pytest.mark.usefixtures("taped")
def test_a_whole_run_learns_the_same(tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path) -> None:
    """With its evaluations and checkpoints, and stopped and resumed on the way, which captures anew."""
    found = []
    for update in ("graph", "compiled"):
        config = tiny(
            optimizer=OPTIMIZER,
            training={"token_budget": 128 * 20, "epochs": 4},
            execution={"update": update},
            output={"checkpoint": "interval", "checkpoint_interval": 4},
        )
        out = tmp_path / update
        out.mkdir()
        assert Run(config, tiny_cache, out, stop_at=9).execute() == 0
        assert Run(config, tiny_cache, out, checkpoint=find_checkpoint(out)).execute() == 0
        found.append(learned(out))
    assert found[0] == found[1]


def test_a_fault_is_explained_after_a_captured_update(taped: None, tiny: MakeConfig) -> None:
    """The explanation runs the model eagerly, and captures nothing."""
    with Trainer(solo(tiny), None) as trainer:
        for _ in range(UPDATES):
            trainer.step()
        assert isinstance(trainer.model, Llama)
        assert "finite when done again eagerly" in explain_fault(trainer, None, 0)
