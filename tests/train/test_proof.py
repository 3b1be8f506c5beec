"""A trial is believed with its proof alone: liars are planted in real trials and end invalid, others stay complete."""

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from liars import LIES, Lie, lying
from whole_trials import measured

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.measure.kernels import by_category
from tinyllm_ray.measure.parity import FLOAT32, Tolerance
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.judgement import judged
from tinyllm_ray.train import proof as proof_module
from tinyllm_ray.train import reference as reference_module
from tinyllm_ray.train import update as update_module
from tinyllm_ray.train.proof import Watched
from tinyllm_ray.train.recipe import learning_rate_sum
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these hold what the CPU computes")

MakeConfig = Callable[..., Config]
Measure = Callable[..., TrialRecord]
Told = Callable[[TrialRecord], TrialRecord]

PROTOCOL = Protocol(warmup_updates=10, windows=1, updates_per_window=10)
CHECKED = [1, 5, 10, 20]


@pytest.fixture(scope="module")
def measure(tiny: MakeConfig, tiny_cache: TokenCache) -> Measure:
    """A whole trial of one layer and gradients that are clipped, from its request to its record."""

    def run(parity: bool = False, **sections: Any) -> TrialRecord:
        config = tiny(**{"model": {"layers": 1}, "optimizer": {"gradient_clip": 0.5}} | sections)
        return measured(config, tiny_cache, PROTOCOL, parity)

    return run


@pytest.fixture(scope="module")
def baseline(measure: Measure) -> TrialRecord:
    return measure(parity=True)


@pytest.fixture(scope="module")
def told(baseline: TrialRecord, tiny: MakeConfig) -> Told:
    """A record as the study hears of it, which has heard of the baseline before."""
    rates = partial(learning_rate_sum, tiny())
    return lambda record: judged(record, [baseline], baseline.execution_identity, rates)


@pytest.fixture
def _one_profiled_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the events of an update takes longer than making it."""
    monkeypatch.setattr(proof_module, "_PROFILED_UPDATES", 1)


class TestRecord:
    def test_it_holds_every_kernel_of_an_update_and_the_losses_on_the_way(
        self, baseline: TrialRecord, tiny: MakeConfig, tiny_cache: TokenCache
    ) -> None:
        assert (baseline.fate, baseline.reason) == (Fate.COMPLETE, None)
        assert baseline.proof is not None
        assert baseline.kernels is not None
        assert baseline.seconds.proof is not None
        assert baseline.seconds.proof > 0
        assert baseline.proof.kernel_source == "operators"
        assert 1 <= (baseline.proof.profiled_updates or 0) <= 3
        assert (baseline.proof.attention_asked, baseline.proof.attention_seen) == ("auto", ["flash"])
        launches = {kernel.name: kernel.launches for kernel in baseline.kernels}
        assert launches["aten::_scaled_dot_product_flash_attention_for_cpu_backward"] == 2, "one a micro-batch"
        sums = by_category(baseline.kernels)
        assert all(sums[category][0] > 0 for category in ("matmul", "loss", "norm", "activation", "optimizer", "copy"))
        with Trainer(tiny(model={"layers": 1}, optimizer={"gradient_clip": 0.5}), tiny_cache) as trainer:
            said = [trainer.step() for _ in range(20)]
        assert [(point.update, point.loss, point.grad_norm) for point in baseline.proof.trajectory] == [
            (update, said[update - 1].loss.item(), said[update - 1].grad_norm.item()) for update in CHECKED
        ]
        assert baseline.windows[0].loss == said[19].loss.item(), "measured before the proof"
        parity = baseline.proof.parity
        assert parity is not None
        assert (parity.updates, parity.targets) == (20 + (baseline.proof.profiled_updates or 0), 128)
        assert parity.relative_gradient_error is not None
        assert 0 < parity.relative_gradient_error < FLOAT32.gradient

    def test_what_cannot_be_proved_is_invalid_and_keeps_its_figures(
        self, measure: Measure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB")

        monkeypatch.setattr(proof_module, "record_kernels", fail)
        record = measure()
        assert (record.fate, record.reason) == (Fate.INVALID, "not proved: OutOfMemoryError: CUDA out of memory.")
        assert record.targets_per_second is not None
        assert record.kernels is None
        assert record.proof is not None
        assert record.proof.attention_seen == []
        assert [point.update for point in record.proof.trajectory] == CHECKED


class TestAttention:
    def test_another_backend_than_the_asked_one_is_invalid(
        self, measure: Measure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As over a cache that gives one backend's graph to another."""
        monkeypatch.setattr(update_module, "sdpa_backend", lambda name: nullcontext())
        record = measure(execution={"sdpa_backend": "math"})
        assert record.fate is Fate.INVALID
        assert record.reason is not None
        assert record.reason.startswith("sdpa_backend math: flash ran: aten::_scaled_dot_product_flash_attention_for_c")
        assert record.proof is not None
        assert record.proof.attention_seen == ["flash"]


@pytest.mark.usefixtures("_one_profiled_update")
class TestLiars:
    @pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
    def test_each_ends_invalid_beside_the_baseline(self, lie: Lie, measure: Measure, told: Told) -> None:
        with lying(lie):
            record = measure(execution={"sdpa_backend": "flash"})
        assert record.fate is Fate.COMPLETE, "its kernels are those that were asked for"
        record = told(record)
        assert record.fate is Fate.INVALID
        assert re.fullmatch(
            r"update \d+: (loss|gradient norm) \S+ is outside, equal runs lie in \S+ to \S+", record.reason or ""
        )

    @pytest.mark.parametrize(
        "name",
        ["does not clip", "drops the last micro-batch", "replays a batch", "loses accumulated gradients"],
    )
    def test_a_baseline_that_lies_is_caught_by_parity(self, name: str, measure: Measure) -> None:
        """It has no other to be compared with."""
        with lying(LIES[name]):
            record = measure(parity=True)
        assert record.fate is Fate.INVALID
        assert re.match(
            r"parity with float32: the (loss|gradient) differs by \S+ of the reference's, more than",
            record.reason or "",
        )

    @pytest.mark.parametrize(
        "execution",
        [{"micro_batch_size": 8}, {"micro_batch_size": 1, "sdpa_backend": "math"}, {"sdpa_backend": "flash"}],
    )
    def test_honest_executions_stay_complete(self, execution: dict[str, Any], measure: Measure, told: Told) -> None:
        record = told(measure(parity=True, execution=execution))
        assert (record.fate, record.reason) == (Fate.COMPLETE, None)


class TestLowPrecision:
    """bf16 autocast, as the trainer has it on a GPU."""

    @pytest.fixture(autouse=True)
    def _as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch, _one_profiled_update: None) -> None:
        real = torch.autocast
        monkeypatch.setattr(torch, "autocast", lambda device, dtype, **_: real(device, dtype))

    def test_it_is_not_what_float32_computes(self, measure: Measure) -> None:
        record = measure(parity=True)
        assert record.fate is Fate.INVALID
        assert str(record.reason).startswith("parity with float32: the ")

    def test_ordinary_rounding_passes_where_bf16_is_what_was_asked(
        self, measure: Measure, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reference_module, "in_bf16", lambda device: True)
        # Less than bf16 does to this model, as the tolerance may be for a smaller one.
        monkeypatch.setattr(reference_module, "BFLOAT16", Tolerance(loss=1e-3, gradient=1e-3, weight=0.25))
        record = measure(parity=True)
        assert (record.fate, record.reason) == (Fate.COMPLETE, None)
        assert record.proof is not None
        assert record.proof.parity is not None
        assert record.proof.parity.relative_gradient_error is not None
        assert record.proof.parity.relative_gradient_error > 2e-3

    @pytest.mark.parametrize("name", ["does not clip", "drops the last micro-batch"])
    def test_a_liar_is_told_from_rounding(self, name: str, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference_module, "in_bf16", lambda device: True)
        with lying(LIES[name]):
            record = measure(parity=True)
        assert record.fate is Fate.INVALID
        assert str(record.reason).startswith("parity with float32: the ")


class TestPacks:
    @pytest.mark.parametrize(
        "packing",
        [
            {"topology": "complete", "scheme": "awc"},
            {"topology": "one_peer_ring", "scheme": "atc"},
            {"variants": [{"seed": 1}, {"seed": 2, "betas": [0.8, 0.9]}]},
        ],
    )
    def test_every_model_is_compared_on_its_own_rows(self, packing: dict[str, Any], measure: Measure) -> None:
        record = measure(parity=True, packing={"models": 2, **packing}, execution={"micro_batch_size": 2})
        assert (record.fate, record.reason) == (Fate.COMPLETE, None)
        assert record.proof is not None
        assert record.proof.parity is not None
        assert str(record.proof.parity.worst_weight).startswith("model ")
        assert record.proof.parity.relative_gradient_error is not None


class Replayed(Trainer):
    """Its statistics are always the same two tensors, as those of a replayed graph are."""

    def __init__(self) -> None:
        self.updates = 0
        self._said = Statistics(torch.zeros(2), torch.zeros(2))

    def step(self) -> Statistics:
        self.updates += 1
        self._said.loss.copy_(torch.tensor([self.updates, self.updates + 1.0]))
        self._said.grad_norm.fill_(math.nan if self.updates == 5 else 0.5)
        return self._said


def test_what_is_kept_outlives_the_next_replay() -> None:
    watched = Watched(Replayed())
    for _ in range(9):
        watched.step()
    points = [(point.update, point.loss, point.grad_norm) for point in watched.trajectory()]
    assert points == [(1, 1.5, 0.5), (5, 5.5, None)]


def test_without_parity_there_is_no_second_model(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "check_parity", None)
    record = measure()
    assert record.fate is Fate.COMPLETE
    assert record.proof is not None
    assert record.proof.parity is None
