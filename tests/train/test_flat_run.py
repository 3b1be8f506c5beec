"""Runs with the flat optimizer: interrupted, gone on with under either optimizer, exported."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flat_kernels import DEVICE, runnable
from one_layer import one_layer
from runs import learned, metrics_of, weights_of
from safetensors.torch import load_file

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.model.huggingface import to_transformers
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.checkpoints import save_checkpoint
from tinyllm_ray.train.export import export_run
from tinyllm_ray.train.trainer import Trainer

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="bits are promised on the CPU")

UPDATES = 12
FLAT, TORCH = ("--set", "execution.optimizer_kernel=triton"), ("--set", "execution.optimizer_kernel=torch")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with runnable():
        yield


@pytest.fixture(scope="module")
def recipe(tiny: MakeConfig, tiny_cache: TokenCache, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny(
        training={"token_budget": UPDATES * 128, "epochs": 2},
        execution={"deterministic": True, "micro_batch_size": 8},
        data={"cache": str(tiny_cache.folder)},
    )


def train(recipe: Config, out: Path, *arguments: str) -> int:
    path = out.with_suffix(".yaml")
    path.write_text(recipe.to_yaml())
    return main(["--config", str(path), "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def unbroken(recipe: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(recipe, out, *FLAT) == 0
    return out


@pytest.mark.parametrize("stop", [1, 5])
def test_stopped_and_resumed_it_learns_the_same_bits(recipe: Config, unbroken: Path, tmp_path: Path, stop: int) -> None:
    out = tmp_path / "run"
    assert train(recipe, out, *FLAT, "--stop-at", str(stop)) == 0
    assert train(recipe, out, *FLAT, "--resume") == 0
    assert learned(out) == learned(unbroken)


@pytest.mark.parametrize(("before", "after"), [(FLAT, TORCH), (TORCH, FLAT)])
def test_it_goes_on_under_the_other_optimizer(
    recipe: Config, unbroken: Path, tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    assert train(recipe, out, *before, "--stop-at", "5") == 0
    assert train(recipe, out, *after, "--resume") == 0
    found, expected = ([line["loss"] for line in metrics_of(folder)] for folder in (out, unbroken))
    assert found == pytest.approx(expected, rel=1e-6)
    for one, other in zip(weights_of(out, recipe).parameters(), weights_of(unbroken, recipe).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_exported_is_what_was_trained(recipe: Config, tiny_cache: TokenCache, tmp_path: Path) -> None:
    config = recipe.with_execution({"optimizer_kernel": "triton"})
    with Trainer(config, tiny_cache) as trainer:
        for _ in range(2):
            trainer.step()
        (tmp_path / "run").mkdir()
        save_checkpoint(tmp_path / "run", 2, trainer.model, trainer.optimizer, {}, config, tiny_cache.identity)
        expected = to_transformers({name: weight.detach() for name, weight in trainer.model.named_parameters()})
    export_run(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
