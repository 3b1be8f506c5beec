"""The whole update in a CUDA graph: it learns what the uncaptured one learns, whatever goes on in between."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import poison, random_batch, state_of

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.kernels import attention_backend, by_category, record_kernels
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.evaluate import Evaluator
from tinyllm_ray.train.graph_update import WARM_UP_UPDATES
from tinyllm_ray.train.trainer import Solo, Trainer

MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
MODEL = {"layers": 2, "width": 128, "heads": 2, "ffn": 256, "context": 128, "vocab_size": 64, "init_std": 0.05}
OPTIMIZER = {"gradient_clip": 0.5, "eps": 0.01}
"""Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
VARIANTS = [{"seed": 1, "peak_learning_rate": 0.03}, {"seed": 2}, {"weight_decay": 0.7}]
MIXED = {"topology": "one_peer_ring", "consensus_start_fraction": 0.25, "consensus_power": 1}
ALL_KERNELS = {
    **{f"{part}_kernel": "triton" for part in ("loss", "norm", "rotary", "activation", "optimizer")},
    "residual_dtype": "bfloat16",
    "recompute_activations": True,
}
TOLERANCE = 5e-3
"""Of losses in bf16 after tens of updates, where the order of atomic additions is not promised."""


@pytest.fixture(autouse=True)
def _each_on_its_own() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


@pytest.fixture
def config(tiny: MakeConfig) -> Config:
    """One model, eight rows an update in one micro-batch."""
    return make(tiny)


def make(tiny: MakeConfig, packing: dict[str, Any] | None = None, rows: int = 8, **execution: Any) -> Config:
    return tiny(
        model=MODEL,
        optimizer=OPTIMIZER,
        training={"tokens_per_update": 128 * rows, "token_budget": 128 * rows * 60, "epochs": 2},
        packing=packing or {"models": 1},
        execution={"update": "graph", "micro_batch_size": rows, "sdpa_backend": "flash", **execution},
    )


def train(config: Config, cache: TokenCache | None, updates: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses and norms [updates, 2, ...], and the weights after them."""
    with Trainer(config, cache) as trainer:
        said = [torch.stack(trainer.step()) for _ in range(updates)]
        return torch.stack(said), [weight.detach().clone() for weight in trainer.model.parameters()]


def compiled(config: Config) -> Config:
    return config.with_execution({"update": "compiled"})


class TestLearning:
    @pytest.mark.parametrize("micro_batch_size", [8, 1])
    def test_losses_are_those_of_the_uncaptured_update(
        self, config: Config, tiny_cache: TokenCache, micro_batch_size: int
    ) -> None:
        asked = config.with_execution({"micro_batch_size": micro_batch_size})
        found, expected = train(asked, tiny_cache, 40)[0], train(compiled(asked), tiny_cache, 40)[0]
        assert found[-5:, 0].mean() < 0.9 * found[0, 0], "it learns"
        torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=TOLERANCE, atol=0)

    @pytest.mark.parametrize("micro_batch_size", [8, 1])
    def test_so_are_all_bits_where_equal_bits_are_promised(
        self, config: Config, tiny_cache: TokenCache, micro_batch_size: int
    ) -> None:
        asked = config.with_execution({"micro_batch_size": micro_batch_size, "deterministic": True})
        found, expected = train(asked, tiny_cache, 40), train(compiled(asked), tiny_cache, 40)
        assert torch.equal(found[0], expected[0])
        assert all(map(torch.equal, found[1], expected[1]))

    @pytest.mark.slow
    def test_autotuned_code_is_captured_too(self, config: Config, tiny_cache: TokenCache) -> None:
        asked = config.with_execution({"compile_mode": "max-autotune-no-cudagraphs"})
        found, expected = train(asked, tiny_cache, 20)[0], train(compiled(asked), tiny_cache, 20)[0]
        torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=TOLERANCE, atol=0)

    @pytest.mark.parametrize("kernels", [{"optimizer_kernel": "triton"}, ALL_KERNELS])
    @pytest.mark.parametrize("micro_batch_size", [8, 2])
    def test_so_are_those_of_triton_kernels(
        self, config: Config, tiny_cache: TokenCache, kernels: dict[str, Any], micro_batch_size: int
    ) -> None:
        asked = config.with_execution({"micro_batch_size": micro_batch_size, **kernels})
        found, expected = train(asked, tiny_cache, 20)[0], train(compiled(asked), tiny_cache, 20)[0]
        torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=TOLERANCE, atol=0)

    @pytest.mark.parametrize("packing", [{"variants": VARIANTS}, MIXED | {"scheme": "awc"}, MIXED | {"scheme": "atc"}])
    @pytest.mark.parametrize("backward", ["at_once", "one_by_one"])
    def test_so_are_those_of_packs(
        self, tiny: MakeConfig, tiny_cache: TokenCache, packing: dict[str, Any], backward: str
    ) -> None:
        rows = 12 if "topology" in packing else 4
        asked = make(tiny, {"models": 3, **packing}, rows, micro_batch_size=2, packed_backward=backward)
        found, expected = train(asked, tiny_cache, 16), train(compiled(asked), tiny_cache, 16)
        torch.testing.assert_close(found[0][:, 0], expected[0][:, 0], rtol=TOLERANCE, atol=0)
        for one, other in zip(found[1], expected[1], strict=True):
            assert (one - other).norm() / other.norm() < 2e-2

    def test_every_rate_counts(self, config: Config) -> None:
        """A frozen one would move weights where the rate is 0, or none where it is not."""
        trainee = Solo(config, DEVICE)
        ids = random_batch(config).to(torch.uint16).to(DEVICE)
        for rate in (0.0, 0.01, 0.0, 0.02, 0.0, 0.01, 0.0):
            before = [weight.detach().clone() for weight in trainee.model.parameters()]
            for group in trainee.optimizer.param_groups:
                group["lr"].fill_(rate)
            trainee.run(ids)
            moved = [not torch.equal(one, two) for one, two in zip(before, trainee.model.parameters(), strict=True)]
            assert set(moved) == {rate > 0}

    def test_every_batch_counts(self, config: Config) -> None:
        """At rate 0, so that each loss is that of its rows; read after all of them are queued."""
        trainee = Solo(config, DEVICE)
        batches = [random_batch(config, seed).to(torch.uint16).to(DEVICE) for seed in range(10)]
        said = [trainee.run(batch) for batch in batches]
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            expected = [trainee.model.loss(ids[:, :-1], ids[:, 1:]).item() for ids in (one.long() for one in batches)]
        assert [one.loss.item() for one in said] == pytest.approx(expected, rel=1e-3)
        assert len({one.loss.item() for one in said}) == len(said)


class TestGuard:
    @pytest.mark.parametrize("harm", ["loss nan", "gradient inf"])
    @pytest.mark.parametrize("at", [1, WARM_UP_UPDATES, WARM_UP_UPDATES + 2])
    def test_a_fault_changes_nothing(
        self, tiny: MakeConfig, harm: str, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = tiny(model={"layers": 1}, execution={"update": "graph", "micro_batch_size": 2})
        marker = random_batch(config, at)[7, :-1].to(DEVICE)
        monkeypatch.setattr("tinyllm_ray.train.trainer.initialize", lambda *how: poison(initialize(*how), harm, marker))
        trainee = Solo(config, DEVICE)
        states, said = [], []
        for update in range(at + 3):
            states.append(state_of(trainee.model, trainee.optimizer))
            said.append(trainee.step(random_batch(config, update).to(torch.uint16).to(DEVICE), update + 1))
        assert [math.isfinite(one.loss) and math.isfinite(one.grad_norm) for one in said] == [
            update < at for update in range(at + 3)
        ]
        assert all(math.isnan(one.loss) for one in said[at + 1 :])
        found = state_of(trainee.model, trainee.optimizer)
        assert [name for name, value in states[at].items() if not torch.equal(found[name], value)] == []


class TestInBetween:
    @pytest.mark.parametrize("after", [1, WARM_UP_UPDATES, WARM_UP_UPDATES + 2])
    def test_evaluations_checkpoints_and_memory_of_others_disturb_nothing(
        self, tiny: MakeConfig, tiny_cache: TokenCache, after: int, tmp_path: Path
    ) -> None:
        config = make(tiny, deterministic=True)
        expected, weights = train(config, tiny_cache, 12)
        batches = [np.random.default_rng(0).integers(0, 64, (4, 129)).astype(np.uint16)]
        with Trainer(config, tiny_cache) as trainer:
            evaluator = Evaluator(trainer.evaluation_models()[0], config, DEVICE)
            said, losses = [], []
            for update in range(12):
                said.append(torch.stack(trainer.step()))
                if update + 1 >= after:
                    losses.append(evaluator.evaluate(batches)[0])
                    held = [torch.full((2**size,), math.nan, device=DEVICE) for size in range(8, 26)]
                    del held
                    save_checkpoint(
                        tmp_path, update + 1, trainer.model, trainer.optimizer, {}, config, tiny_cache.identity
                    )
            assert torch.equal(torch.stack(said), expected)
            assert all(map(torch.equal, trainer.model.parameters(), weights))
        assert len(set(losses)) == len(losses), "it sees the weights of every update"

    @pytest.mark.parametrize("done", [1, WARM_UP_UPDATES + 2])
    def test_a_resumed_training_captures_anew_and_goes_on(
        self, tiny: MakeConfig, tiny_cache: TokenCache, done: int, tmp_path: Path
    ) -> None:
        config = make(tiny, deterministic=True)
        with Trainer(config, tiny_cache) as unbroken, Trainer(config, tiny_cache, updates=done) as resumed:
            for _ in range(done):
                unbroken.step()
            folder = save_checkpoint(
                tmp_path, done, unbroken.model, unbroken.optimizer, {}, config, tiny_cache.identity
            )
            open_checkpoint(folder).load_weights(resumed.model)
            open_checkpoint(folder).load_training(resumed.model, resumed.optimizer)
            for _ in range(WARM_UP_UPDATES + 3):
                assert torch.equal(torch.stack(resumed.step()), torch.stack(unbroken.step()))

    def test_two_graphs_live_side_by_side(self, tiny: MakeConfig, tiny_cache: TokenCache) -> None:
        config = make(tiny, deterministic=True)
        alone = train(config, tiny_cache, 8)[0]
        with Trainer(config, tiny_cache) as one, Trainer(config, tiny_cache) as other:
            both = [(torch.stack(one.step()), torch.stack(other.step())) for _ in range(8)]
        for update, pair in enumerate(both):
            assert all(torch.equal(found, alone[update]) for found in pair)


class TestDevice:
    def test_steady_updates_wait_for_nothing(self, config: Config, tiny_cache: TokenCache) -> None:
        with Trainer(config, tiny_cache) as trainer:
            for _ in range(WARM_UP_UPDATES + 1):
                trainer.step()
            torch.cuda.set_sync_debug_mode("error")
            try:
                said = [trainer.step() for _ in range(10)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(math.isfinite(one.loss) for one in said)

    @pytest.mark.parametrize("update", ["graph", "compiled"])
    def test_pytorch_warns_of_no_optimizer(self, config: Config, update: str, recwarn: pytest.WarningsRecorder) -> None:
        train(config.with_execution({"update": update}), None, WARM_UP_UPDATES + 2)
        assert not any("capturable" in str(warning.message) for warning in recwarn)

    @pytest.mark.parametrize("micro_batch_size", [8, 2])
    def test_replays_show_every_kernel(self, config: Config, micro_batch_size: int) -> None:
        found = []
        for asked in (config, compiled(config)):
            with Trainer(asked.with_execution({"micro_batch_size": micro_batch_size}), None) as trainer:
                for _ in range(WARM_UP_UPDATES + 2):
                    trainer.step()
                seen = record_kernels(trainer.step, trainer.synchronize, DEVICE, limit_seconds=10)
                assert attention_backend(seen.kernels) == {"flash"}
                found.append({name: launches for name, (_, launches) in by_category(seen.kernels).items()})
        graph, expected = found
        assert graph["attention_forward"] >= 2 * (8 // micro_batch_size), "a layer and micro-batch"
        for category in ("attention_forward", "attention_backward", "matmul", "loss", "norm", "optimizer"):
            assert graph[category] == expected[category] > 0, category

    def test_its_memory_is_a_pool_of_its_own_that_is_given_back(self, config: Config) -> None:
        others = private_bytes()
        with Trainer(config, None) as trainer:
            for _ in range(WARM_UP_UPDATES):
                trainer.step()
            assert private_bytes() == others
            trainer.step()
            pool = private_bytes() - others
            assert pool > 8 * 128 * 64 * 2, "the logits at the least"
            trainer.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert private_bytes() == others
        assert torch.cuda.memory_reserved() <= before - pool


def private_bytes() -> int:
    """In segments that are no part of the pool that everything else shares."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


class TestRefusal:
    @pytest.mark.parametrize("case", ["host_read", "host_read_in_backward", "out_of_memory"])
    def test_what_cannot_be_captured_is_said(self, case: str) -> None:
        """In a process of its own: PyTorch's allocator goes on as if a capture that failed were still under way."""
        program = Path(__file__).with_name("refused_captures.py")
        done = subprocess.run([sys.executable, program, case], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
