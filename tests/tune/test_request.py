"""What a request leaves open, chosen for the machine and the recipe."""

from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.config import load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.objective import Objective
from tinyllm_ray.search.space import load_space
from tinyllm_ray.tune import Tuner
from tinyllm_ray.tune.request import StudyRequest, check_request

PACK = ["packing.models=2", "packing.topology=complete", "packing.scheme=awc"]


def requested(**asked: Any) -> StudyRequest:
    return StudyRequest(budget="1m", budget_seconds=60.0, total_seconds=60.0, age_seconds=0.0, out="studies/x", **asked)


def choose(device_kind: str, **asked: Any) -> tuple[str, str, list[str]]:
    """Preset's parameters, space's name, and what is said."""
    config, space, notes = check_request(requested(**asked)).for_machine(device_kind)
    return f"{config.model.parameters:,}", space.name, notes


def test_what_is_named_is_taken_without_a_word() -> None:
    assert choose("cpu", recipe="20m", space="execution") == ("20,403,520", "execution", [])


@pytest.mark.parametrize(
    ("device_kind", "asked", "space"),
    [
        ("cuda", {}, "execution"),
        ("cuda", {"recipe": "packed8-20m-awc"}, "packed"),
        ("cuda", {"recipe": "20m-32k", "overrides": ["packing.models=8"]}, "packed"),
        ("cpu", {}, "smoke"),
        ("cpu", {"recipe": "nano", "overrides": PACK}, "smoke"),
    ],
)
def test_the_space_goes_by_the_machine_and_by_whether_models_are_packed(
    device_kind: str, asked: dict[str, Any], space: str
) -> None:
    assert choose(device_kind, **asked)[1] == space


def test_on_a_cpu_packs_are_asked_how_they_pass_backward_as_well() -> None:
    request = requested(recipe="nano", overrides=PACK)
    config, space, notes = check_request(request).for_machine("cpu")
    assert notes == ["space smoke and packed_backward of space packed: no GPU here; name another with --space"]
    fit = fit_space(space, config, "cpu", cores=2)
    ways = {config.with_execution(execution).packed_backward for execution in fit.executions()}
    assert ways == {"at_once", "one_by_one", "processes"}
    assert choose("cpu", recipe="nano")[2] == ["space smoke: no GPU here; name another with --space"]


def test_a_study_is_after_the_seconds_of_all_planned_trainings() -> None:
    def asked(*overrides: str, **more: Any) -> Objective:
        return requested(**more).objective_of(load("nano", overrides))

    assert asked() == Objective("training", 1_048_576, 100)
    assert asked("packing.models=3", runs=240) == Objective("training", 3 * 1_048_576, 240), "each has the budget"
    assert asked(*PACK) == Objective("training", 1_048_576, 100), "mixed models share one"
    assert asked(objective="throughput").kind == "throughput"


@pytest.mark.parametrize(
    ("asked", "own", "chosen"),
    [(None, "by_count", "by_count"), ("by_need", "by_count", "by_need"), (None, None, "by_need")],
)
def test_a_request_goes_before_the_space_in_how_the_search_is_timed(asked: Any, own: str | None, chosen: str) -> None:
    space = load_space("smoke").model_dump(mode="json", exclude=set() if own else {"search_windows"})
    named = space | ({"search_windows": own} if own else {})
    request = requested(recipe="nano", space=named, search_windows=asked)
    config, found, _ = check_request(request).for_machine("cpu")
    fit = fit_space(found, config, "cpu", cores=2)
    assert fit.search_windows == chosen
    assert fit.search_protocol.version == ("adaptive" if chosen == "by_need" else 2)


def test_no_planned_training_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"--runs: 0 is no number of trainings; give 1 or more"):
        choose("cpu", runs=0)


def test_a_decision_file_that_cannot_be_written_is_said_before_the_study(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--decisions .*/file/below/d\.yaml: it cannot be written in .*/file;"):
        choose("cpu", recipe="nano", decisions=[tmp_path / "file" / "below" / "d.yaml"])
    choose("cpu", recipe="nano", decisions=[tmp_path / "folder" / "below" / "d.yaml"])
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"objective": "speed"}, "the request: objective: 'speed' is not allowed"),
        ({"search_windows": "many"}, "the request: search_windows: 'many' is not allowed"),
        ({"runs": "few"}, "the request: runs: 'few' is not allowed"),
        ({"overrides": [3]}, "the request: overrides.0: 3 is not allowed"),
        ({"preset": ""}, "'' is neither a preset"),
        ({"preset": None, "config": ""}, "'' is neither a preset"),
        ({"preset": None, "config": Path("/")}, "'/' is neither a preset"),
        ({"space": ""}, "'' is neither a shipped space"),
        ({"out": ""}, "out: '' names no folder"),
    ],
)
def test_what_python_asks_for_amiss_is_one_line(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Tuner(**{"budget": "1m", "out": tmp_path / "study", "preset": "nano", **asked})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
