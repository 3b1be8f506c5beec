"""Packs through the real command: mixed and apart, to their end, interrupted, and with a model that goes non-finite."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import one_layer
from runs import lines_of, metrics_of, read_json
from safetensors.torch import load_file

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.train import packed_update
from tinyllm_ray.train.__main__ import main
from tinyllm_ray.train.checkpoints import find_checkpoint
from tinyllm_ray.train.recipe import learning_rate, solo_config

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def tiny(tiny: MakeConfig) -> MakeConfig:
    """Of a single layer: the time goes by layers, and what is asked of one is asked of each."""
    return one_layer(tiny)


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes")

TRAINING = {"token_budget": 12 * 128, "epochs": 3}
VARIANTS = [{}, {"seed": 7, "peak_learning_rate": 0.02}, {"betas": [0.8, 0.9], "weight_decay": 0.0}]


@pytest.fixture(scope="module", autouse=True)
def _compile_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path_factory.mktemp("compile")))


@pytest.fixture(scope="module")
def mixed(tiny: MakeConfig, tiny_cache: TokenCache) -> Config:
    packing = {"models": 2, "topology": "one_peer_ring", "scheme": "awc"}
    data = {"cache": str(tiny_cache.folder)}
    return tiny(training=TRAINING, packing=packing, data=data, execution={"deterministic": True})


@pytest.fixture(scope="module")
def apart(tiny: MakeConfig, tiny_cache: TokenCache) -> Config:
    packing = {"models": 3, "variants": VARIANTS}
    data = {"cache": str(tiny_cache.folder)}
    return tiny(training=TRAINING, packing=packing, data=data, execution={"deterministic": True})


def train(config: Config, out: Path, *arguments: str) -> int:
    recipe = out.with_suffix(".yaml")
    recipe.write_text(config.to_yaml())
    return main(["--config", str(recipe), "--out", str(out), *arguments])


def weights_of(out: Path) -> dict[str, Any]:
    """Every file of weights in the newest checkpoint, by its place."""
    folder = find_checkpoint(out).path
    return {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weight.flatten() for _, weight in sorted(weights.items())])


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for place, weights in expected.items():
        assert all(torch.equal(found[place][name], weight) for name, weight in weights.items()), place


@pytest.fixture(scope="module")
def run(apart: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pack that trained apart to its end."""
    out = tmp_path_factory.mktemp("apart") / "run"
    assert train(apart, out) == 0
    return out


class TestMixed:
    def test_is_one_training_evaluated_at_its_average(
        self, mixed: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert train(mixed, out) == 0
        result = read_json(out / "result.json")
        assert (result["status"], result["step"], result["models"]) == ("complete", 12, 2)
        assert result["tokens"] == 12 * 128  # of both together
        lines = metrics_of(out)
        assert [len(line["losses"]) for line in lines] == [2] * 12
        assert lines[-1]["loss"] == pytest.approx(np.mean(lines[-1]["losses"]))
        evaluated = lines_of(out / "evaluations.jsonl")
        assert [line["split"] for line in evaluated] == ["subset"] * 3 + ["validation"]
        assert all("model" not in line for line in evaluated)
        ends = [line["step"] for line in evaluated[:3]]
        apart = {line["step"]: line["consensus_distance"] for line in lines if "consensus_distance" in line}
        assert [*apart] == ends, "costs a pass over the weights, so at evaluations alone"
        assert [line["consensus_distance"] for line in evaluated] == [*apart.values(), apart[12]]
        weights = weights_of(out)
        workers = [flat(weights[f"workers/{worker:02}/model.safetensors"]) for worker in range(2)]
        distance = (workers[0] - workers[1]).norm() / (workers[0] + workers[1]).norm()  # half of each
        assert result["consensus_distance"] == apart[12] == pytest.approx(distance.item(), rel=1e-4)
        assert apart[12] > 0
        assert weights.keys() == {"model.safetensors", "workers/00/model.safetensors", "workers/01/model.safetensors"}
        for name, average in weights["model.safetensors"].items():
            both = [weights[f"workers/{worker:02}/model.safetensors"][name] for worker in range(2)]
            torch.testing.assert_close(average, torch.stack(both).mean(0), rtol=1e-6, atol=1e-7)
        capsys.readouterr()
        assert main(["evaluate", str(out)]) == 0
        assert f'"loss": {result["validation"]["loss"]},' in capsys.readouterr().out
        assert main(["evaluate", str(find_checkpoint(out).path / "workers" / "00")]) == 0
        assert f'"loss": {result["validation"]["loss"]},' not in capsys.readouterr().out

    @pytest.mark.parametrize("stop", [1, 4, 7])
    def test_resumes_bit_for_bit(self, mixed: Config, tmp_path: Path, stop: int) -> None:
        unbroken, out = tmp_path / "unbroken", tmp_path / "run"
        assert train(mixed, unbroken) == 0
        assert train(mixed, out, "--stop-at", str(stop)) == 0
        assert train(mixed, out, "--resume") == 0
        assert_equal(weights_of(out), weights_of(unbroken))
        assert [line["losses"] for line in metrics_of(out)] == [line["losses"] for line in metrics_of(unbroken)]
        for name in ("evaluations.jsonl", "metrics.jsonl"):
            distances = [[line.get("consensus_distance") for line in lines_of(run / name)] for run in (out, unbroken)]
            assert distances[0] == distances[1]
        assert read_json(out / "best.json") == read_json(unbroken / "best.json")

    def test_another_mixing_is_another_recipe(
        self, mixed: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        assert train(mixed, out, "--stop-at", "1") == 0
        assert train(mixed, out, "--resume", "--set", "packing.scheme=atc") == 2
        assert 'packing.scheme "awc", asked "atc"' in capsys.readouterr().err


class TestApart:
    @pytest.mark.parametrize("model", range(3))
    def test_every_model_is_the_run_it_would_be_alone(
        self, run: Path, apart: Config, tmp_path: Path, model: int
    ) -> None:
        alone = tmp_path / "alone"
        assert train(solo_config(apart, model), alone) == 0
        assert [line["losses"][model] for line in metrics_of(run)] == pytest.approx(
            [line["loss"] for line in metrics_of(alone)], rel=1e-5
        )
        result, expected = read_json(run / "result.json"), read_json(alone / "result.json")
        assert result["validation"]["losses"][model] == pytest.approx(expected["validation"]["loss"], rel=1e-5)
        assert result["bests"][model]["step"] == expected["best"]["step"]
        evaluated = [line["loss"] for line in lines_of(run / "evaluations.jsonl") if line["model"] == model]
        assert evaluated == pytest.approx([line["loss"] for line in lines_of(alone / "evaluations.jsonl")], rel=1e-5)

    @pytest.mark.parametrize(
        ("variants", "said"), [(None, True), ([{"seed": 1}, {"seed": 1}], True), ([{}, {"seed": 1}], False)]
    )
    def test_equal_runs_are_pointed_out(
        self, apart: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], variants: Any, said: bool
    ) -> None:
        values = apart.model_dump(mode="json")
        values["packing"] |= {"models": 2, "variants": variants}
        assert train(Config.model_validate(values), tmp_path / "run", "--stop-at", "1") == 0
        assert ("equal runs" in capsys.readouterr().err) == said

    def test_counts_the_targets_of_all(self, run: Path) -> None:
        result = read_json(run / "result.json")
        assert (result["tokens"], result["step"]) == (3 * 12 * 128, 12)
        assert result["consensus_distance"] is None
        assert not any("consensus_distance" in line for line in metrics_of(run) + lines_of(run / "evaluations.jsonl"))
        assert weights_of(run).keys() == {f"workers/{worker:02}/model.safetensors" for worker in range(3)}

    def test_resumes_bit_for_bit(self, run: Path, apart: Config, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert train(apart, out, "--stop-at", "5") == 0
        assert train(apart, out, "--resume") == 0
        assert_equal(weights_of(out), weights_of(run))
        assert lines_of(out / "evaluations.jsonl")[0].keys() == lines_of(run / "evaluations.jsonl")[0].keys()

    def test_one_model_can_be_evaluated(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["evaluate", str(run)]) == 2
        assert "workers" in capsys.readouterr().err
        assert main(["evaluate", str(find_checkpoint(run).path / "workers" / "01")]) == 0
        losses = read_json(run / "result.json")["validation"]["losses"]
        assert f'"loss": {losses[1]}' in capsys.readouterr().out

    def test_every_line_has_the_rates_that_models_had(self, run: Path, apart: Config) -> None:
        line = metrics_of(run)[3]
        assert line["lrs"] == pytest.approx([learning_rate(solo_config(apart, model), 3) for model in range(3)])

    def test_a_model_that_goes_non_finite_stops_alone(
        self, apart: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        broken = apart.model_dump(mode="json")
        broken["packing"]["variants"][1]["peak_learning_rate"] = 1e20
        out, whole = tmp_path / "run", tmp_path / "whole"
        assert train(Config.model_validate(broken), out) == 0
        assert train(apart, whole) == 0
        result = read_json(out / "result.json")
        assert result["status"] == "complete"
        printed = capsys.readouterr()
        assert "model 1 stopped at update" in printed.err
        assert "micro-batch" in printed.err
        assert "model 1 stopped at update" in printed.out
        (model, update), *others = result["stopped"].items()
        assert (model, others) == ("1", [])
        last = metrics_of(out)[-1]
        assert (last["losses"][1], last["step"]) == (None, 12)
        assert update <= 12
        assert last["grad_norms"][1] is None
        assert last["loss"] == pytest.approx(np.mean([last["losses"][0], last["losses"][2]]))
        losses = result["validation"]["losses"]
        assert result["validation"]["loss"] == pytest.approx(np.mean([losses[0], losses[2]]))
        for kept in (0, 2):
            name = f"workers/{kept:02}/model.safetensors"
            assert_equal({name: weights_of(out)[name]}, {name: weights_of(whole)[name]})


def test_where_models_mix_one_fault_stops_all(tiny: MakeConfig, mixed: Config, tmp_path: Path) -> None:
    values = mixed.model_dump(mode="json")
    values["optimizer"]["peak_learning_rate"] = 1e20
    out = tmp_path / "run"
    assert train(Config.model_validate(values), out) == 3
    result = read_json(out / "result.json")
    assert result["status"] == "failed"
    assert result["fault"]["update"] == result["step"] + 1
    assert "micro-batch" in result["fault"]["where"]
    assert all(weight.isfinite().all() for weights in weights_of(out).values() for weight in weights.values())


@pytest.mark.parametrize("packing", [{"models": 2, "topology": "complete", "scheme": "atc"}, {"models": 2}])
def test_a_fault_of_the_execution_can_be_gone_on_from(
    tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: dict[str, Any]
) -> None:
    """A checkpoint from before the fault holds nothing of it."""
    config = tiny(training=TRAINING, packing=packing, data={"cache": str(tiny_cache.folder)})
    out, whole = tmp_path / "run", tmp_path / "whole"
    norms = packed_update.gradient_norms
    updates = []

    def broken_at_update_5(weights: Any) -> torch.Tensor:
        updates.append(None)
        found: torch.Tensor = norms(weights)
        return found * float("nan") if len(updates) == 5 else found

    monkeypatch.setattr(packed_update, "gradient_norms", broken_at_update_5)
    assert train(config, out) == 3
    result = read_json(out / "result.json")
    assert (result["step"], result["fault"]["update"], result["stopped"]) == (4, 5, None)
    assert "model 0: finite when done again" in result["fault"]["where"]
    monkeypatch.undo()
    assert train(config, out, "--resume") == 0
    assert train(config, whole) == 0
    assert_equal(weights_of(out), weights_of(whole))


def test_all_that_go_non_finite_are_named_once_more_when_gone_on_with(apart: Config, tmp_path: Path) -> None:
    values = apart.model_dump(mode="json")
    for variant in values["packing"]["variants"]:
        variant["peak_learning_rate"] = 1e20
    out = tmp_path / "run"
    assert train(Config.model_validate(values), out) == 3
    fault = read_json(out / "result.json")["fault"]
    assert train(Config.model_validate(values), out, "--resume") == 3
    assert read_json(out / "result.json")["fault"]["update"] == fault["update"]
