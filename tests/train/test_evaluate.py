"""The validation loss of ragged batches, eager and compiled, and that training goes on as if there had been none."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import one_layer
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.loader import validation_batches
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.train import evaluate as evaluate_module
from tinyllm_ray.train.evaluate import Evaluator, evaluate, evaluation_rows, is_compiled
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.update import Update

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")

executions = pytest.mark.parametrize("update", ["eager", "compiled"])


@pytest.fixture(autouse=True)
def _graphs_without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Dynamo and AOTAutograd make of the functions; Inductor's kernels would take a compiler the time."""
    compile_function = torch.compile

    def without_kernels(function: Callable[..., torch.Tensor], **keywords: Any) -> Callable[..., torch.Tensor]:
        assert keywords["fullgraph"]
        assert keywords["dynamic"] is False
        return compile_function(function, backend="aot_eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", without_kernels)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=""), torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of eight targets at a time."""
    monkeypatch.setattr(evaluate_module, "_COMPILED_LOGITS", 61 * 8)
    monkeypatch.setitem(evaluate_module._EAGER_LOGITS, "cpu", 61 * 8)


def make(tiny: MakeConfig, update: str = "eager", **sections: Any) -> tuple[Config, Llama, Evaluator]:
    config = tiny(evaluation_execution={"update": update}, **sections)
    model = initialize(config.model, seed=0)
    return config, model, Evaluator(model, config, CPU)


def random_rows(config: Config, *shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, config.model.vocab_size, shape).astype(np.uint16)


def per_target(model: Llama, config: Config, rows: np.ndarray) -> list[float]:
    """Every target's loss in float64, from a row of its own that ends with it."""
    exact = initialize(config.model, seed=0).double()
    exact.load_state_dict(model.state_dict())
    found = []
    with torch.no_grad():
        for row in torch.from_numpy(rows.astype(np.int64)):
            for at in range(1, len(row)):
                logits = exact(row[None, :at])[0, -1]
                found.append(float(logits.exp().sum().log() - logits[row[at]]))
    return found


@executions
@pytest.mark.usefixtures("few_logits")
def test_every_target_counts_once_and_filled_up_ones_never(tiny: MakeConfig, update: str) -> None:
    config, model, evaluator = make(tiny, update)
    batches = [random_rows(config, *shape) for shape in ((4, 17), (2, 17), (1, 6), (3, 9), (1, 2))]
    losses = [per_target(model, config, rows) for rows in batches]
    assert np.ptp([np.mean(part) for part in losses]) > 0.05, "batches differ, so that weights matter"
    everything = [loss for part in losses for loss in part]

    loss, targets = evaluator.evaluate(batches)
    assert targets == len(everything)
    assert loss == pytest.approx(np.mean(everything), rel=2e-6)
    assert counters["stats"]["unique_graphs"] == (2 if update == "compiled" else 0)


@executions
@pytest.mark.usefixtures("few_logits")
def test_equals_the_eager_loss_of_whole_batches_over_a_split(
    tiny: MakeConfig, tiny_cache: TokenCache, update: str
) -> None:
    config, model, evaluator = make(tiny, update)
    batches = list(validation_batches(tiny_cache, config.model.context, evaluator.rows))
    assert {rows.shape for rows in batches} == {(4, 17), (2, 17), (1, 8)}, "the last rows and the tail are among them"
    expected, targets = evaluate(model, batches, "auto")
    assert evaluator.evaluate(batches) == (pytest.approx(expected, rel=1e-6), targets)


def test_a_few_last_targets_are_no_length_of_their_own(tiny: MakeConfig) -> None:
    """For which the attention asked for may have no kernel."""
    config, model, evaluator = make(tiny)
    lengths: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    evaluator.evaluate([random_rows(config, *shape) for shape in ((4, 17), (1, 17), (1, 6), (1, 2))])
    assert set(lengths) == {config.model.context}


class LargestLogits(TorchFunctionMode):
    """Remembers the most elements of any tensor whose last dimension is the vocabulary, and whether one had a graph."""

    elements = 0
    graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.ndim > 1 and out.shape[-1] == 61:
            self.elements = max(self.elements, out.numel())
            self.graph |= out.requires_grad
        return out


@pytest.mark.usefixtures("few_logits")
def test_logits_of_a_chunk_exist_and_never_those_of_a_batch(tiny: MakeConfig) -> None:
    config, model, evaluator = make(tiny)
    rows = random_rows(config, 4, 17)
    assert evaluator.chunk == 8
    with LargestLogits() as seen:
        evaluator.evaluate([rows])
    assert seen.elements == 8 * 61
    assert not seen.graph, "nothing is kept for a backward pass"
    with LargestLogits() as seen:
        evaluate(model, [rows], "auto")
    assert seen.elements == 4 * 16 * 61, "the plain loss holds them all"


@executions
def test_a_chunk_divides_the_batch_for_odd_numbers_of_rows(tiny: MakeConfig, update: str) -> None:
    seven = {"training": {"tokens_per_update": 112}, "execution": {"micro_batch_size": 7}}
    _, _, evaluator = make(tiny, update, **seven)
    assert (evaluator.rows, evaluator.chunk) == (7, 112)
    config = tiny(model={"vocab_size": 2**22}, evaluation_execution={"update": update}, **seven)
    with torch.device("meta"):
        model = Llama(config.model)
    assert Evaluator(model, config, CPU).chunk == {"eager": 4, "compiled": 112}[update]


@executions
def test_weights_that_change_are_seen(tiny: MakeConfig, update: str) -> None:
    config, model, evaluator = make(tiny, update)
    rows = random_rows(config, 3, 17)
    before, _ = evaluator.evaluate([rows])
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    after, _ = evaluator.evaluate([rows])
    assert after == pytest.approx(evaluate(model, [rows], "auto")[0], rel=1e-6)
    assert abs(after - before) > 0.01


@executions
def test_training_goes_on_as_if_nothing_had_been_evaluated(tiny: MakeConfig, update: str) -> None:
    config = tiny(execution={"update": update}, evaluation_execution={"update": update})
    batch = torch.from_numpy(random_rows(config, 8, 17).astype(np.int64))

    def train(evaluations: int) -> tuple[list[float], list[torch.Tensor]]:
        torch._dynamo.reset()
        model = initialize(config.model, seed=0)
        step = Update(model, build_optimizer(model, config.optimizer, CPU), config)
        tag = torch.compiler.config.cache_key_tag
        evaluator = Evaluator(model, config, CPU)
        assert torch.compiler.config.cache_key_tag == tag, "training's graphs compiled later go under the same tag"
        losses = []
        for _ in range(3):
            losses.append(step(batch, 0.01).loss.item())
            for _ in range(evaluations):
                evaluator.evaluate([random_rows(config, 4, 17), random_rows(config, 1, 5)])
                assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
        return losses, [weight.detach().clone() for weight in model.parameters()]

    losses, weights = train(0)
    same_losses, same_weights = train(2)
    assert same_losses == losses
    assert all(map(torch.equal, same_weights, weights))


class StoppedError(Exception):
    """What a caller raises where a signal came."""


@executions
def test_an_exception_out_of_the_batches_ends_that_evaluation_alone(tiny: MakeConfig, update: str) -> None:
    config, model, evaluator = make(tiny, update, execution={"sdpa_backend": "math"})
    rows = random_rows(config, 4, 17)
    expected = evaluator.evaluate([rows])

    def interrupted() -> Iterator[np.ndarray]:
        yield random_rows(config, 2, 17)
        raise StoppedError

    with pytest.raises(StoppedError):
        evaluator.evaluate(interrupted())
    assert torch.is_grad_enabled()
    assert torch.backends.cuda.flash_sdp_enabled(), "the choice of backend ended too"
    assert evaluator.evaluate([rows]) == expected
    torch.autograd.backward(model.loss(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64)))
    assert model.embedding.weight.grad is not None


def test_no_targets_are_a_mistake_of_the_caller(tiny: MakeConfig) -> None:
    with pytest.raises(ValueError, match="no targets"):
        make(tiny)[2].evaluate([])


@executions
def test_the_backend_asked_for_is_the_one_used(tiny: MakeConfig, update: str) -> None:
    config, _, evaluator = make(tiny, update, execution={"sdpa_backend": "cudnn"})
    with pytest.raises(Exception, match=r"No (viable backend|available kernel)"):
        evaluator.evaluate([random_rows(config, 2, 17)])


class TestDefaults:
    def test_rows_are_the_training_s_and_many_on_a_gpu(self, tiny: MakeConfig) -> None:
        assert evaluation_rows(tiny(), CPU) == 4
        assert evaluation_rows(tiny(), CUDA) == 131_072 // 16
        assert evaluation_rows(tiny(model={"context": 30}, training={"tokens_per_update": 240}), CUDA) == 4370
        large = tiny(training={"tokens_per_update": 2**18}, execution={"micro_batch_size": 2**14})
        assert evaluation_rows(large, CUDA) == 2**14

    @pytest.mark.parametrize("device", [CPU, CUDA])
    def test_rows_that_were_asked_for_are_taken(self, tiny: MakeConfig, device: torch.device) -> None:
        assert evaluation_rows(tiny(evaluation_execution={"micro_batch_size": 3}), device) == 3

    def test_compiled_on_a_gpu_where_training_is_and_it_pays(self, tiny: MakeConfig) -> None:
        eager, compiled = tiny(), tiny(execution={"update": "compiled"})
        assert is_compiled(compiled, CUDA)
        assert is_compiled(compiled, CUDA, expected_targets=197_411_295)
        assert not is_compiled(compiled, CUDA, expected_targets=4_300_000)
        assert not is_compiled(eager, CUDA)
        assert not is_compiled(compiled, CPU)

    @pytest.mark.parametrize("device", [CPU, CUDA])
    def test_what_was_asked_for_is_done(self, tiny: MakeConfig, device: torch.device) -> None:
        asked = tiny(evaluation_execution={"update": "compiled"})
        assert is_compiled(asked, device, expected_targets=1)
        asked = tiny(execution={"update": "compiled"}, evaluation_execution={"update": "eager"})
        assert not is_compiled(asked, device)
