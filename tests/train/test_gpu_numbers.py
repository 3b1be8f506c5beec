"""On a GPU: bf16 updates against float32, equal bits where they are promised, and the kernels that ran.

$TINYLLM_RAY_FIGURES names a JSON file for the errors and kernels that were found, $TINYLLM_RAY_TRAINED one that keeps
the trained weights for other processes; without them neither is kept.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_numbers import (
    BACKENDS,
    HOWS,
    Computed,
    Weights,
    compute,
    compute_all,
    digest_of_run,
    error,
    family,
    reference,
    rows_of,
    without_checks,
)
from poison import check_guard
from safetensors.torch import load_file

from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.sections import ModelConfig
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.weights import save_weights

MakeConfig = Callable[..., Config]
Figures = dict[str, Any]

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LOSS_BOUND, GRADIENT_BOUND = 1e-3, 2e-2


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Figures by name, beside what they were found with."""
    cudnn = torch.backends.cudnn.version()
    return {"torch": torch.__version__, "cudnn": cudnn, "gpu": torch.cuda.get_device_name()}


@pytest.fixture(autouse=True)
def _each_on_its_own(figures: Figures) -> Iterator[None]:
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    if path := os.environ.get("TINYLLM_RAY_FIGURES"):
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


@pytest.fixture(scope="session")
def cache() -> TokenCache:
    return open_cache(default_cache())


@pytest.fixture(scope="session")
def recipe() -> Config:
    """20m at 32,768 tokens an update, without clipping, which would hide a gradient's scale."""
    return load("20m-32k", ["optimizer.gradient_clip=off"])


@pytest.fixture(scope="session")
def weights(recipe: Config, cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """Fresh ones, and those after 300 updates."""
    path = Path(os.environ.get("TINYLLM_RAY_TRAINED") or tmp_path_factory.mktemp("trained") / "model.safetensors")
    if not path.exists():
        with Trainer(recipe.with_execution({"micro_batch_size": 32}), cache) as trainer:
            for _ in range(300):
                said = trainer.step()
            assert said.loss.item() < 6.0, "the weights are not trained"
            save_weights(trainer.model, path)
    return {"fresh": weights_of(recipe), "trained": load_file(path)}


def weights_of(config: Config) -> Weights:
    return {name: weight.detach() for name, weight in initialize(config.model, config.training.seed).named_parameters()}


@pytest.fixture(scope="session")
def references(recipe: Config, weights: dict[str, Weights], cache: TokenCache) -> dict[str, Computed]:
    batch = rows_of(cache, 32, 1024, DEVICE)
    return {name: reference(recipe, held, batch) for name, held in weights.items()}


def combinations(*micro_batch_sizes: int, slow: Callable[[str, int], bool]) -> pytest.MarkDecorator:
    """Every kind of update, backend and micro-batch size; those that are `slow` wait for --slow."""
    values = [
        pytest.param(how, backend, size, marks=[pytest.mark.slow] if slow(how, size) else [])
        for how in HOWS
        for backend in BACKENDS
        for size in micro_batch_sizes
    ]
    return pytest.mark.parametrize(("how", "backend", "micro_batch_size"), values)


@combinations(8, 32, slow=lambda how, size: how != "eager" and size == 8)
def test_bf16_stays_near_float32_on_the_kernels_that_were_asked_for(
    recipe: Config,
    weights: dict[str, Weights],
    references: dict[str, Computed],
    cache: TokenCache,
    figures: Figures,
    how: str,
    backend: str,
    micro_batch_size: int,
) -> None:
    config = recipe.with_execution({"micro_batch_size": micro_batch_size, "sdpa_backend": backend, **HOWS[how]})
    found = compute_all(config, list(weights.values()), rows_of(cache, 32, 1024, DEVICE))
    for name, computed in zip(weights, found, strict=True):
        errors = error(computed, references[name])
        figures[f"parity {how} {backend} mb{micro_batch_size} {name}"] = {
            "loss": computed.loss,
            "loss_error": errors.loss,
            "gradient_error": errors.gradient,
            "kernels": computed.kernels,
        }
        assert errors.loss < LOSS_BOUND
        assert errors.gradient < GRADIENT_BOUND
        if backend != "auto":
            assert family(computed.kernels) == backend


SHAPES = [("eager", context) for context in (512, 1000, 2048)] + [("default", 1000)]
"""What is compiled differs by the odd length alone."""


@pytest.mark.parametrize(("how", "context"), SHAPES)
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_shapes_stay_near_float32_or_are_refused(
    recipe: Config, cache: TokenCache, figures: Figures, how: str, backend: str, features: int, context: int
) -> None:
    model = ModelConfig(layers=2, width=4 * features, heads=4, ffn=512, context=context, init_std=0.05)
    training = recipe.training.model_copy(update={"tokens_per_update": 8 * context})
    shaped = recipe.model_copy(update={"model": model, "training": training})
    config = shaped.with_execution({"micro_batch_size": 4, "sdpa_backend": backend, **HOWS[how]})
    batch, weights = rows_of(cache, 8, context, DEVICE), weights_of(config)
    name = f"shape {how} {backend} features {features} context {context}"
    try:
        computed = compute(config, weights, batch)
    except RuntimeError as refusal:  # which a trial reports as its failure
        figures[name] = {"refused": str(refusal)[:300]}
    if "refused" in figures.get(name, {}):
        assert backend != "auto"
        return
    errors = error(computed, reference(config, weights, batch))
    figures[name] = {"loss_error": errors.loss, "gradient_error": errors.gradient, "kernels": computed.kernels}
    assert errors.loss < LOSS_BOUND
    assert errors.gradient < GRADIENT_BOUND


def small(recipe: Config, **execution: Any) -> Config:
    """Two layers of 20m."""
    config = recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": 2})})
    return config.with_execution(execution)


@pytest.mark.parametrize("how", ["default", "reduce-overhead"])
def test_backends_run_their_own_kernels_over_one_compile_cache(
    recipe: Config, cache: TokenCache, figures: Figures, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    batch = rows_of(cache, 32, 1024, DEVICE)
    for backend in (*BACKENDS, *BACKENDS[1:]):
        torch._dynamo.reset()
        config = small(recipe, micro_batch_size=8, sdpa_backend=backend, **HOWS[how])
        kernels = compute(config, weights_of(config), batch).kernels
        figures[f"one cache {how} {backend}"] = kernels
        assert backend == "auto" or family(kernels) == backend


@combinations(32, 128, slow=lambda how, size: how != "eager")
def test_equal_runs_give_equal_bits_where_that_is_promised(
    recipe: Config,
    figures: Figures,
    how: str,
    backend: str,
    micro_batch_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each run with a compile cache of its own, so that kernels chosen by their timing could differ."""
    config = without_checks(
        one_micro_batch(recipe, micro_batch_size), **HOWS[how], sdpa_backend=backend, deterministic=True
    )
    digests = []
    name = f"bits {how} {backend} mb{micro_batch_size}"
    try:
        for run in ("first", "second"):
            torch._dynamo.reset()
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / run))
            digests.append(digest_of_run(config, updates=6))
        figures[name] = "equal" if digests[0] == digests[1] else "differ"
    except RuntimeError as refusal:
        figures[name] = str(refusal)[:300]
    assert figures[name] == "equal" or backend == "cudnn"


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_without_the_promise(recipe: Config, figures: Figures, backend: str) -> None:
    """What the promise is worth: equal runs, eager, as they are without it."""
    config = one_micro_batch(recipe, 128).with_execution({"micro_batch_size": 128, "sdpa_backend": backend})
    equal = len({digest_of_run(config, updates=6) for _ in range(3)}) == 1
    figures[f"bits not promised eager {backend} mb128"] = "equal" if equal else "differ"


def one_micro_batch(recipe: Config, rows: int) -> Config:
    """Two layers of 20m, few tokens to choose from (128 rows of the whole vocabulary's logits take 60 GB), and an
    update of one micro-batch."""
    training = recipe.training.model_copy(update={"tokens_per_update": 1024 * rows})
    model = recipe.model.model_copy(update={"layers": 2, "vocab_size": 4096})
    return recipe.model_copy(update={"model": model, "training": training}).with_execution({"micro_batch_size": rows})


@pytest.mark.parametrize("harm", ["loss nan", "gradient inf"])
@pytest.mark.parametrize("how", HOWS)
def test_a_fault_leaves_everything_as_it_was(tiny: MakeConfig, how: str, harm: str) -> None:
    config = tiny(model={"layers": 1}, execution={"micro_batch_size": 2, **HOWS[how]})
    check_guard(config, harm, at=0, device=DEVICE)
    check_guard(config, harm, at=4, updates=7, device=DEVICE)  # within replays


@pytest.mark.parametrize("micro_batch_size", [1, 4, 32])
def test_gradients_do_not_depend_on_the_micro_batch(recipe: Config, cache: TokenCache, micro_batch_size: int) -> None:
    """In bf16, so within what bf16 rounds."""
    whole, parts = (small(recipe, micro_batch_size=size) for size in (32, micro_batch_size))
    batch, weights = rows_of(cache, 32, 1024, DEVICE), weights_of(whole)
    errors = error(compute(parts, weights, batch), compute(whole, weights, batch))
    assert errors.loss < 1e-4
    assert errors.gradient < GRADIENT_BOUND
