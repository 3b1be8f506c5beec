"""One update against a plain loop in float64, whatever its micro-batches and however it is executed."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from poison import (
    FAULTS,
    HARMED,
    Weights,
    build_poisoned,
    check_guard,
    random_batch,
    state_of,
    weights_of,
)
from torch._dynamo.utils import counters
from torch.nn import functional

from tinyllm_ray.config import Config
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.recipe import learning_rate
from tinyllm_ray.train.update import Statistics, Update, build_loss, tag_compile_cache

MakeConfig = Callable[..., Config]

RATES = (0.0, 0.01, 0.03, 0.002)
"""Each differs from the first, which alone a graph that froze it would use."""


def build(config: Config, dtype: torch.dtype = torch.float32) -> tuple[Llama, Update]:
    model = initialize(config.model, config.training.seed).to(dtype)
    return model, Update(model, build_optimizer(model, config.optimizer, torch.device("cpu")), config)


def gradients_of(model: Llama, update: int) -> Weights:
    """Those that the optimizer is about to use, clipped."""
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    return {f"update {update}, gradient of {name}": grad.clone() for name, grad in named if grad is not None}


def run(config: Config, dtype: torch.dtype = torch.float32) -> tuple[list[Statistics], Weights]:
    """An update a rate, each on a batch of its own: what they say, and all gradients beside the last weights."""
    model = initialize(config.model, config.training.seed).to(dtype)
    optimizer = build_optimizer(model, config.optimizer, torch.device("cpu"))
    update = Update(model, optimizer, config)
    said: list[Statistics] = []
    gradients: Weights = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update(gradients_of(model, len(said))))
    for seed, rate in enumerate(RATES):
        said.append(update(random_batch(config, seed), rate))
    assert len(gradients) == len(RATES) * len(weights_of(model))
    return said, gradients | weights_of(model)


def reference(config: Config) -> tuple[list[tuple[float, float]], Weights]:
    """The same updates as PyTorch's manual has them: float64, the whole batch at once, no fusing."""
    model = initialize(config.model, config.training.seed).double()
    settings = config.optimizer
    norms = [weight for name, weight in model.named_parameters() if "norm" in name]
    matrices = [weight for name, weight in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        betas=settings.betas,
        eps=settings.eps,
        foreach=False,
        fused=False,
    )
    said: list[tuple[float, float]] = []
    kept: Weights = {}
    for seed, rate in enumerate(RATES):
        batch = random_batch(config, seed)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate, dtype=torch.float32).item()  # rates are kept in float32
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        limit = settings.gradient_clip
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / (norm + 1e-6))  # PyTorch's guard against a norm of zero
        kept |= gradients_of(model, seed)
        optimizer.step()
        said.append((loss.item(), norm.item()))
    return said, kept | weights_of(model)


def assert_same(found: tuple[Any, Weights], expected: tuple[Any, Weights], tolerance: float) -> None:
    for at, (one, other) in enumerate(zip(found[0], expected[0], strict=True)):
        assert [float(x) for x in one] == pytest.approx([float(x) for x in other], rel=tolerance), f"update {at}"
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        error = (found[1][name].double() - weight.double()).norm() / weight.double().norm()
        assert error < tolerance, f"{name}: {error}"


@pytest.fixture
def config(tiny: MakeConfig) -> Config:
    """Clipping that bites, and an eps beside which it shows: AdamW forgives a gradient's scale otherwise."""
    return tiny(optimizer={"gradient_clip": 0.5, "eps": 0.01})


def changed(config: Config, section: str, **settings: Any) -> Config:
    values = config.model_dump(mode="json")
    values[section] |= settings
    return Config.model_validate(values)


class TestEager:
    def test_equals_the_plain_loop_in_float64(self, config: Config) -> None:
        assert_same(run(config, torch.float64), reference(config), 1e-9)

    def test_equals_the_plain_loop_in_float32(self, config: Config) -> None:
        assert_same(run(config), reference(config), 1e-5)

    def test_without_clipping_equals_the_plain_loop_without(self, config: Config) -> None:
        off = changed(config, "optimizer", gradient_clip=None)
        assert_same(run(off, torch.float64), reference(off), 1e-9)
        with pytest.raises(AssertionError):  # and clipping matters here
            assert_same(run(off, torch.float64), reference(config), 1e-3)

    @pytest.mark.parametrize(("rows", "micro_batch_size"), [(8, 1), (8, 2), (8, 4), (32, 1), (32, 8)])
    def test_micro_batches_change_nothing(self, config: Config, rows: int, micro_batch_size: int) -> None:
        """As 32 x 1 a loss that is summed or averaged once too often shows 32-fold."""
        config = changed(config, "training", tokens_per_update=16 * rows)
        whole = changed(config, "execution", micro_batch_size=rows)
        parts = changed(config, "execution", micro_batch_size=micro_batch_size)
        assert parts.accumulation == rows // micro_batch_size
        assert_same(run(parts, torch.float64), run(whole, torch.float64), 1e-9)
        assert_same(run(parts), run(whole), 1e-5)

    @pytest.mark.parametrize("backend", ["flash", "math"])
    def test_sdpa_backends_change_nothing(self, config: Config, backend: str) -> None:
        assert_same(run(changed(config, "execution", sdpa_backend=backend)), run(config), 1e-5)

    def test_a_backend_that_cannot_run_here_raises(self, config: Config) -> None:
        _, update = build(changed(config, "execution", sdpa_backend="cudnn"))
        with pytest.raises(RuntimeError):
            update(random_batch(config), 0.01)

    def test_loss_is_that_before_the_weights_changed(self, config: Config) -> None:
        model, update = build(config)
        batch = random_batch(config)
        with torch.no_grad():
            before = model.loss(batch[:, :-1], batch[:, 1:]).item()
        assert update(batch, 0.03).loss.item() == pytest.approx(before, rel=1e-5)
        assert update(batch, 0.03).loss.item() < before - 1e-3

    def test_statistics_stay_as_they_were(self, config: Config) -> None:
        """They are read some updates later."""
        _, update = build(config)
        first = update(random_batch(config, 0), 0.03)
        before = (first.loss.item(), first.grad_norm.item())
        update(random_batch(config, 1), 0.03)
        assert (first.loss.item(), first.grad_norm.item()) == before

    def test_the_schedule_on_one_batch_brings_the_loss_down(self, tiny: MakeConfig) -> None:
        config = tiny(training={"token_budget": 40 * 128})
        _, update = build(config)
        batch = random_batch(config)
        losses = [update(batch, learning_rate(config, at)).loss.item() for at in range(40)]
        assert losses[-1] < 0.5 * losses[0]


class TestRate:
    """An update that froze the first rate it saw must fail these."""

    def test_weights_see_the_rate_of_each_update(self, config: Config) -> None:
        self.check(config)

    @staticmethod
    def check(config: Config) -> None:
        model, update = build(config)
        fresh = weights_of(model)
        update(random_batch(config, 0), 0.0)
        assert all(torch.equal(weight, fresh[name]) for name, weight in model.named_parameters())
        update(random_batch(config, 1), 0.01)
        moved = weights_of(model)
        assert not any(torch.equal(weight, fresh[name]) for name, weight in moved.items())
        update(random_batch(config, 2), 0.0)
        assert all(torch.equal(weight, moved[name]) for name, weight in model.named_parameters())


class TestGuard:
    """A fault leaves everything as it was before it."""

    @pytest.mark.parametrize("limit", [0.5, None])
    @pytest.mark.parametrize("harm", FAULTS)
    def test_a_fault_in_the_first_update_touches_nothing(self, config: Config, harm: str, limit: float | None) -> None:
        check_guard(changed(config, "optimizer", gradient_clip=limit), harm, at=0)

    @pytest.mark.parametrize("limit", [0.5, None])
    @pytest.mark.parametrize("harm", FAULTS)
    def test_nor_does_one_on_the_way_or_any_update_after_it(
        self, config: Config, harm: str, limit: float | None
    ) -> None:
        check_guard(changed(config, "optimizer", gradient_clip=limit), harm, at=2, updates=5)

    @pytest.mark.parametrize("row", [0, 3, 4, 7])
    @pytest.mark.parametrize("harm", FAULTS)
    def test_one_micro_batch_is_enough(self, config: Config, harm: str, row: int) -> None:
        check_guard(changed(config, "execution", micro_batch_size=2), harm, row=row)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_broken_weight_stays_the_only_one(self, config: Config, value: float) -> None:
        model, optimizer, update = build_poisoned(config, "none", at=0)
        update(random_batch(config, 0), 0.01)
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight[5, 2] = value  # type: ignore[union-attr,index]
        before = state_of(model, optimizer)
        for seed in (1, 2):
            assert math.isnan(update(random_batch(config, seed), 0.01).loss)
        found = state_of(model, optimizer)
        differing = [
            name for name, tensor in before.items() if not torch.equal(found[name].nan_to_num(), tensor.nan_to_num())
        ]
        assert differing == []

    def test_a_huge_norm_is_no_fault(self, config: Config) -> None:
        model, optimizer, update = build_poisoned(config, "gradient huge", at=1)
        fresh = state_of(model, optimizer)
        said = [update(random_batch(config, seed), 0.01) for seed in range(3)]
        assert 1e14 < said[1].grad_norm.item() < math.inf
        assert all(math.isfinite(one.loss) for one in said)
        assert update.stopped.item() == 0.0
        found = state_of(model, optimizer)
        assert found["step of norm.weight"].item() == 3
        assert not torch.equal(found[HARMED], fresh[HARMED])

    def test_the_guard_of_one_model_is_not_anothers(self, config: Config) -> None:
        check_guard(config, "loss nan", at=0)
        _, update = build(config)
        assert math.isfinite(update(random_batch(config), 0.01).loss)


class TestShape:
    @pytest.mark.parametrize("shape", [(7, 17), (8, 16), (9, 17), (8,)])
    def test_another_than_the_updates_is_refused(self, config: Config, shape: tuple[int, ...]) -> None:
        _, update = build(config)
        with pytest.raises(ValueError, match=r"no update of 8 rows of 16 \+ 1 tokens"):
            update(torch.zeros(shape, dtype=torch.int64), 0.01)


class TestCompileCacheTag:
    @pytest.fixture(autouse=True)
    def _keep_tag(self) -> Iterator[None]:
        with torch.compiler.config.patch(cache_key_tag=""):
            yield

    @staticmethod
    def tag(tiny: MakeConfig, **execution: Any) -> str:
        tag = tag_compile_cache(tiny(execution={"update": "compiled", **execution}))
        assert tag == torch.compiler.config.cache_key_tag
        return tag

    def test_every_backend_and_mode_has_its_own(self, tiny: MakeConfig) -> None:
        backends = ("auto", "flash", "cudnn", "efficient", "math")
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        tags = {self.tag(tiny, sdpa_backend=backend, compile_mode=mode) for backend in backends for mode in modes}
        assert len(tags) == len(backends) * len(modes)
        assert "" not in tags
        assert self.tag(tiny, deterministic=True) not in tags

    @pytest.mark.parametrize("settings", [{"cpu_threads": 7}, {"prefetch_depth": 5}, {"update": "graph"}])
    def test_what_changes_no_graph_shares_one(self, tiny: MakeConfig, settings: dict[str, Any]) -> None:
        assert self.tag(tiny, **settings) == self.tag(tiny)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
class TestCompiled:
    """What Dynamo makes of an update. The kernels that Inductor builds of it take a compiler the better part of a
    minute; `test_candidates.py` has a candidate that runs them.
    """

    @pytest.fixture(autouse=True)
    def _fresh_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        forget_graphs()
        with torch.compiler.config.patch(cache_key_tag=""):
            yield
        forget_graphs()

    @pytest.fixture
    def settings(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Compiles into PyTorch's own kernels; the settings that torch.compile was given."""
        settings: dict[str, Any] = {}

        def without_kernels(function: Callable[..., torch.Tensor], **keywords: Any) -> Callable[..., torch.Tensor]:
            settings.update(keywords)
            return compile_function(function, backend="aot_eager", fullgraph=keywords["fullgraph"], dynamic=False)

        compile_function = torch.compile
        monkeypatch.setattr(torch, "compile", without_kernels)
        return settings

    def test_one_graph_serves_every_micro_batch_and_rate(self, config: Config, settings: dict[str, Any]) -> None:
        compiled = changed(config, "execution", update="compiled", compile_mode="max-autotune")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same(run(compiled), run(config), 1e-5)
            TestRate.check(compiled)
        assert counters["stats"]["unique_graphs"] == 1
        assert settings == {"mode": "max-autotune", "fullgraph": True, "dynamic": False}

    @pytest.mark.usefixtures("settings")
    @pytest.mark.parametrize("harm", ["loss nan", "gradient inf"])
    def test_the_guard_stands_around_it(self, config: Config, harm: str) -> None:
        one_layer = changed(config, "model", layers=1)
        check_guard(changed(one_layer, "execution", update="compiled", micro_batch_size=2), harm)

    @pytest.mark.usefixtures("settings")
    def test_a_retracing_is_an_error(self, config: Config) -> None:
        """Here because the model has changed, which nothing does."""
        model, update = build(changed(config, "execution", update="compiled"))
        update(random_batch(config), 0.01)
        model.norm.eps = 1e-4
        with pytest.raises(RuntimeError, match="Detected recompile"):
            update(random_batch(config), 0.01)
        _, other = build(changed(config, "execution", update="compiled"))
        other(random_batch(config), 0.01)  # which may still be traced

    @pytest.mark.usefixtures("settings")
    def test_the_recompile_limit_is_an_error_and_never_eager_code(self, config: Config) -> None:
        compiled = changed(config, "execution", update="compiled")
        model = initialize(config.model, 0)
        loss = build_loss(model, compiled, torch.device("cpu"))
        with torch._dynamo.config.patch(recompile_limit=2):
            for rows in (1, 2):
                loss(torch.zeros(rows, 16, dtype=torch.int64), torch.zeros(rows, 16, dtype=torch.int64))
            with pytest.raises(Exception, match="fullgraph=True"):
                loss(torch.zeros(3, 16, dtype=torch.int64), torch.zeros(3, 16, dtype=torch.int64))

    @pytest.mark.usefixtures("settings")
    def test_models_one_after_the_other_do_not_add_up_to_the_limit(self, config: Config) -> None:
        compiled = changed(changed(config, "model", layers=1), "execution", update="compiled")
        with torch._dynamo.config.patch(recompile_limit=2):
            for _ in range(4):
                _, update = build(compiled)
                update(random_batch(config), 0.01)

    def test_cached_graphs_are_whole_and_keep_backends_apart(self, tiny: MakeConfig) -> None:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):  # spares the compiler's probes of the CPU
            assert self.hits_and_misses(tiny, sdpa_backend="flash") == (0, 1)
            assert self.hits_and_misses(tiny, sdpa_backend="flash") == (1, 0)
            assert self.hits_and_misses(tiny, sdpa_backend="flash", cpu_threads=2) == (1, 0)
            assert self.hits_and_misses(tiny, sdpa_backend="math") == (0, 1)

    def test_losses_that_are_built_before_either_is_traced_keep_apart(self, tiny: MakeConfig) -> None:
        backends = ("flash", "math")
        with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
            losses = [self.loss(tiny, sdpa_backend=backend) for backend in backends]
            assert [self.trace(loss) for loss in losses] == [(0, 1), (0, 1)]
            assert [self.hits_and_misses(tiny, sdpa_backend=backend) for backend in backends] == [(1, 0), (1, 0)]

    @classmethod
    def hits_and_misses(cls, tiny: MakeConfig, **execution: Any) -> tuple[int, int]:
        """Of the cache of differentiated graphs, as a new process would have them."""
        return cls.trace(cls.loss(tiny, **execution))

    @staticmethod
    def loss(tiny: MakeConfig, **execution: Any) -> Callable[..., torch.Tensor]:
        config = tiny(execution={"update": "compiled", **execution})
        return build_loss(cast(Llama, Product()), config, torch.device("cpu"))

    @staticmethod
    def trace(loss: Callable[..., torch.Tensor]) -> tuple[int, int]:
        forget_graphs()
        loss(torch.ones(4, 4), torch.ones(4, 4)).backward(torch.ones(4, 4))
        seen = counters["aot_autograd"]
        assert not seen["autograd_cache_bypass"]
        return seen["autograd_cache_hit"], seen["autograd_cache_miss"]


class Product(torch.nn.Module):
    """Stands in for the model: matrix products alone, which need no compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight @ targets


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()
