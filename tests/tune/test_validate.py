"""`tune validate`: which decision a configuration stands for, the answer's file and words, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import RunModule
from recorded_studies import Rate, finish, replace_records, tune, write_study

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError
from tinyllm_ray.measure.gpu_sensors import uuid_of
from tinyllm_ray.records import Fate, read_records
from tinyllm_ray.search.noise import device_name
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.validation import Validation
from tinyllm_ray.tune.again.decision import Decision, read_decision
from tinyllm_ray.tune.again.validate import ValidationReport, one_gpu
from tinyllm_ray.tune.driver import StudyDriver


def faster_with_math(execution: dict[str, Any]) -> float:
    return 3000.0 if execution["sdpa_backend"] == "math" else 2000.0


def slower_with_math(execution: dict[str, Any]) -> float:
    return 1800.0 if execution["sdpa_backend"] == "math" else 2000.0 - execution["micro_batch_size"] / 100


def equal(execution: dict[str, Any]) -> float:
    return 2000.0


def decision_of(selected: Path, cores: int = 2) -> Decision:
    return read_decision(selected, load(selected), "cpu", cores)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Which decision


def test_winner_and_baseline_are_those_of_the_study_under_their_names(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", faster_with_math, verify=True)
    decision = decision_of(tmp_path / "study" / "selected.yaml")
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    question = decision.question
    assert question.baseline.id == summary["baseline"]["candidate"]
    assert question.other.id == question.selected.id == summary["selected"]["candidate"]
    assert question.claim == "faster"
    assert decision.speedup is not None
    assert decision.speedup["verified"]
    assert decision.space.baseline == records[0].execution
    assert decision.notes == ()


def test_a_tie_with_the_baseline_is_claimed_as_one(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert decision_of(tmp_path / "study" / "selected.yaml").question.claim == "faster"
    told = {"ties": [summary["baseline"]["candidate"]]}
    (tmp_path / "study" / "summary.json").write_text(json.dumps(summary | told))
    assert decision_of(tmp_path / "study" / "selected.yaml").question.claim == "tie"
    told = {"speedup": {"ratio": 1.001, "low": 0.99, "high": 1.01, "outcome": "tie", "verified": True}}
    (tmp_path / "study" / "summary.json").write_text(json.dumps(summary | told))
    assert decision_of(tmp_path / "study" / "selected.yaml").question.claim == "tie"


@pytest.mark.parametrize(
    "told",
    [{"ratio": 0.8}, {"ratio": 0.8, "low": 0.79, "high": 0.81, "outcome": "slower", "verified": True}],
    ids=["searched", "verified"],
)
def test_one_that_was_selected_for_its_start_alone_is_nothing_for_pairs(tmp_path: Path, told: dict[str, Any]) -> None:
    write_study(tmp_path / "study", faster_with_math)
    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    (tmp_path / "study" / "summary.json").write_text(json.dumps(summary | {"speedup": told}))
    with pytest.raises(ConfigError, match="slower than its baseline, for its start"):
        decision_of(tmp_path / "study" / "selected.yaml")


def test_a_selected_baseline_is_compared_with_what_came_closest(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", slower_with_math)
    question = decision_of(tmp_path / "study" / "selected.yaml").question
    others = [one for one in records if one.execution != records[0].execution]
    closest = max(others, key=lambda one: one.targets_per_second or 0.0)
    assert question.claim == "baseline"
    assert question.selected == question.baseline
    assert (question.baseline.id, question.other.id) == (records[0].candidate, closest.candidate)


def test_a_selected_baseline_without_another_is_a_mistake(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", slower_with_math)
    replace_records(tmp_path / "study", records[:1])
    with pytest.raises(ConfigError, match="the study has no other that could be faster"):
        decision_of(tmp_path / "study" / "selected.yaml")


def test_without_a_summary_the_records_tell(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", faster_with_math)
    (tmp_path / "study" / "summary.json").unlink()
    decision = decision_of(tmp_path / "study" / "selected.yaml")
    assert decision.space.baseline == records[0].execution
    assert decision.space.protocol == records[0].protocol
    assert (decision.question.claim, decision.speedup) == ("faster", None)


def test_without_a_study_the_baseline_is_what_a_study_starts_from(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    alone = tmp_path / "alone.yaml"
    (tmp_path / "study" / "selected.yaml").rename(alone)
    decision = decision_of(alone)
    assert decision.question.baseline.execution == decision.space.baseline
    assert decision.space.baseline["update"] == "eager"
    assert decision.space.baseline["cpu_threads"] == 2
    assert decision.question.claim == "faster"
    assert "no study beside it" in decision.notes[0]


def test_a_configuration_that_leaves_settings_open_has_them_settled(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    mine = tmp_path / "mine.yaml"
    mine.write_text((tmp_path / "recipe.yaml").read_text() + "execution: {update: compiled}\n")
    other = decision_of(mine).question.other.execution
    assert (other["micro_batch_size"], other["cpu_threads"]) == (8, 2)


def test_what_a_study_would_start_from_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    with pytest.raises(ConfigError, match="nothing to compare"):
        decision_of(tmp_path / "recipe.yaml")


def test_another_recipe_than_the_studys_is_on_its_own(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    selected = tmp_path / "study" / "selected.yaml"
    change(selected, "weight_decay: 0.1", "weight_decay: 0.2")
    decision = decision_of(selected)
    assert decision.records == ()
    assert decision.notes[0].startswith("another recipe than that of the study beside it")


def test_another_execution_than_was_selected_is_said_to_be(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math, verify=True)
    selected = tmp_path / "study" / "selected.yaml"
    change(selected, "prefetch_depth: 1", "prefetch_depth: 2")
    decision = decision_of(selected)
    assert decision.question.other.execution["prefetch_depth"] == 2
    assert decision.question.claim == "faster"
    assert decision.notes == ("its execution is not what the study beside it selected",)


def test_the_noise_of_a_study_counts_on_its_own_device_alone(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", faster_with_math, verify=True)
    decision = decision_of(tmp_path / "study" / "selected.yaml")
    assert decision.spread(device_name(records[0])).degrees > CAUTIOUS_SPREAD.degrees
    assert decision.spread("GPU-of-another") == decision.spread(None) == CAUTIOUS_SPREAD


# What is left behind


class Validating:
    """A validation of the decision in `selected`, driven by hand."""

    def __init__(self, selected: Path, out: Path) -> None:
        (out / "candidates").mkdir(parents=True)
        self.out, config = out, load(selected)
        self.decision = decision_of(selected)
        study = Validation(self.decision.space, self.decision.question)
        self.driver = StudyDriver(study, "validation", config, None, out, Deadline.after(500))
        self.report = ValidationReport(out, "validation", config, 90.0, lambda: 60.0, decision=self.decision)

    def go(self, rate: Rate) -> list[str]:
        finish(self.driver, rate)
        self.report.write(self.driver)
        return self.report.closing_lines(self.driver)

    @property
    def answer(self) -> dict[str, Any]:
        return json.loads((self.out / "validation.json").read_text())


def test_a_decision_that_holds_says_so_beside_what_the_study_found(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math, verify=True)
    validating = Validating(tmp_path / "study" / "selected.yaml", tmp_path / "out")
    lines = validating.go(lambda execution: faster_with_math(execution) * 1.1)
    selected = validating.decision.question.selected.id
    assert lines[0] == f"decision: {selected} is faster than the baseline"
    assert lines[1].startswith(f"holds: {selected} is 1.500x the baseline (")
    assert "; in the study 1.500x (" in lines[1]
    assert lines[-1].endswith("validation.json")
    assert validating.report.exit_status(validating.driver) == EXIT_DONE
    answer = validating.answer
    assert (answer["outcome"], answer["claim"]) == ("holds", "faster")
    assert answer["speedup"]["pairs"] == 3
    assert answer["study_speedup"]["verified"]
    assert answer["selected"]["candidate"] == selected
    assert answer["differences"] == []


def test_one_that_no_longer_holds_is_no_result(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    validating = Validating(tmp_path / "study" / "selected.yaml", tmp_path / "out")
    lines = validating.go(slower_with_math)
    assert lines[1].startswith("no longer holds: ")
    assert "; in the study 1.50x, not verified" in lines[1]
    assert validating.report.exit_status(validating.driver) == EXIT_NO_RESULT


def test_what_could_not_be_told_says_why(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    validating = Validating(tmp_path / "study" / "selected.yaml", tmp_path / "out")
    lines = validating.go(lambda execution: Fate.LOST)
    assert lines[1].startswith("could not be told: ")
    assert any(line.startswith("ended: ") for line in lines)
    assert validating.report.exit_status(validating.driver) == EXIT_NO_RESULT
    assert validating.answer["speedup"] is None


def test_versions_and_devices_that_differ_are_named(tmp_path: Path) -> None:
    records = write_study(tmp_path / "study", faster_with_math)
    old = [one.model_copy(update={"environment": {**one.environment, "versions": {"torch": "1.0"}}}) for one in records]
    replace_records(tmp_path / "study", old)
    validating = Validating(tmp_path / "study" / "selected.yaml", tmp_path / "out")
    lines = validating.go(faster_with_math)
    assert any(line.startswith("versions.torch: ") and line.endswith(" here, 1.0 in the study") for line in lines)
    (torch,) = (one for one in validating.answer["differences"] if one["name"] == "versions.torch")
    assert torch["study"] == "1.0"


def test_before_anything_is_measured_the_file_stands(tmp_path: Path) -> None:
    write_study(tmp_path / "study", faster_with_math)
    validating = Validating(tmp_path / "study" / "selected.yaml", tmp_path / "out")
    validating.report.write(validating.driver)
    assert validating.answer["outcome"] == "could not be told"


@pytest.mark.parametrize(
    ("before", "after"), [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2"), ({"CUDA_VISIBLE_DEVICES": ""}, "")]
)
def test_both_sides_of_a_pair_run_on_one_gpu(before: dict[str, str], after: str) -> None:
    environment = dict(before)
    with one_gpu(environment):
        assert environment["CUDA_VISIBLE_DEVICES"] == after
    assert environment == before


# The command


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_decision_is_put_to_the_test_for_real(built_root: Path, tmp_path: Path) -> None:
    (cache,) = (open_cache(path.parent) for path in built_root.rglob("manifest.json"))
    out = tmp_path / "study"
    # Whether that is so here is the machine's to say.
    write_study(out, lambda execution: 1000.0 if execution["micro_batch_size"] == 8 else 2000.0, cache.identity)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = tune(built_root, tmp_path, "validate", out, "--budget", "6m")
    assert done.status in (0, 3), done.output
    assert "decision: " in done.output
    assert {path: path.read_bytes() for path in before} == before, "nothing of the study is changed"
    (folder,) = (out / "validations").iterdir()
    answer = json.loads((folder / "validation.json").read_text())
    records = read_records(folder / "trials.jsonl")
    assert {one.purpose for one in records} == {"verification"}
    complete = [one for one in records if one.fate == Fate.COMPLETE]
    first = {one.execution_identity: one for one in reversed(complete)}
    assert all(one.proof and one.proof.parity for one in first.values())
    assert answer["outcome"] == "holds" if done.status == 0 else answer["outcome"] != "holds"
    assert f"{answer['outcome']}: {answer['reason']}" in done.output


@pytest.mark.usefixtures("neither_torch_nor_ray")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["study", "--budget", "90"], "--budget: '90' is not a duration"),
        (["study", "--out", "study"], "there is something already"),
        (["alone"], "the study has no other that could be faster"),
        pytest.param(
            ["recipe.yaml"],
            "nothing to compare",
            marks=pytest.mark.skipif(uuid_of("0") is not None, reason="where a study starts depends on what Ray finds"),
        ),
    ],
)
def test_a_mistake_is_status_2(run_module: RunModule, tmp_path: Path, arguments: list[str], said: str) -> None:
    write_study(tmp_path / "study", faster_with_math)
    records = write_study(tmp_path / "alone", slower_with_math)
    replace_records(tmp_path / "alone", records[:1])
    done = run_module("tinyllm_ray.tune", "validate", *arguments, cwd=tmp_path)
    assert done.status == 2, done.output
    assert said in done.output.splitlines()[-1]
