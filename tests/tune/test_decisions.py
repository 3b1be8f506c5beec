"""The decision file: what it is looked up by, how studies add to it, and what a training makes of it."""

import fcntl
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from promises import promised

from tinyllm_ray.config import Config, load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import ExecutionConfig
from tinyllm_ray.train.__main__ import main as train
from tinyllm_ray.tune.decided import follow_decision, place_here
from tinyllm_ray.tune.decisions import Decision, Place, Shape, add_decision, find, nearest, read_decisions

HERE = Place(device="NVIDIA H200", cores=None, versions={"torch": "2.11.0", "cuda": "12.8"})


def decision(
    config: Config | None = None, study: str = "first", place: Place = HERE, verified: bool = True, **execution: Any
) -> Decision:
    config = config or load("20m")
    promise = promised(config.with_execution(execution), 1.9e6, study=study, verified=verified).tuned
    assert promise is not None
    return Decision(
        shape=Shape.of(config),
        place=place,
        execution=ExecutionConfig(**execution),
        promise=promise,
        speedup=1.1,
        date="2026-01-02T03:04:05Z",
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decisions.yaml"


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer.peak_learning_rate=0.1",
        "optimizer.weight_decay=0.3",
        "training.seed=7",
        "training.token_budget=1000000",
        "training.schedule=warmup-stable-decay",
        "evaluation.subset_blocks=8",
        "data.shards_per_range=4",
        "model.init_std=0.1",
        "execution.update=compiled",
        "output.checkpoint=none",
    ],
)
def test_what_a_recipe_learns_by_is_not_looked_at(setting: str) -> None:
    assert Shape.of(load("20m", [setting])) == Shape.of(load("20m"))


@pytest.mark.parametrize(
    "setting",
    [
        "model.layers=9",
        "model.width=640",
        "model.heads=10",
        "model.ffn=1024",
        "model.context=512",
        "model.vocab_size=16000",
        "training.tokens_per_update=32768",
        "packing.models=2",
    ],
)
def test_what_decides_how_fast_a_recipe_is_is_looked_at(setting: str) -> None:
    assert Shape.of(load("20m", [setting])) != Shape.of(load("20m"))


def test_packs_that_mix_otherwise_are_other_shapes() -> None:
    shapes = [Shape.of(load(name)) for name in ("packed4-20m-atc", "packed4-20m-awc")]
    assert shapes[0] != shapes[1]


def test_a_decision_is_found_again_for_its_shape_device_and_versions_alone(file: Path) -> None:
    mine = decision(update="graph", micro_batch_size=32)
    assert add_decision(file, mine)
    known = read_decisions(file)
    assert known == [mine]
    assert find(known, mine.shape, HERE) == mine
    assert find(known, Shape.of(load("50m")), HERE) is None
    assert find(known, mine.shape, HERE.model_copy(update={"device": "NVIDIA GH200 480GB"})) is None
    assert find(known, mine.shape, HERE.model_copy(update={"versions": HERE.versions | {"torch": "2.12.0"}})) is None
    assert find(known, mine.shape, HERE.model_copy(update={"cores": 2})) is None


def test_a_later_study_of_the_same_replaces_and_others_stay(file: Path) -> None:
    other = decision(load("50m"), "other")
    for one in (decision(), other, decision(study="second", update="compiled")):
        assert add_decision(file, one)
    assert {one.promise.study for one in read_decisions(file)} == {"other", "second"}
    found = find(read_decisions(file), Shape.of(load("20m")), HERE)
    assert found is not None
    assert found.execution.update == "compiled"


def test_what_was_verified_is_not_replaced_by_what_was_not_but_by_its_own_study(file: Path) -> None:
    assert add_decision(file, decision(study="sure"))
    assert not add_decision(file, decision(study="hasty", verified=False, update="graph"))
    assert [one.promise.study for one in read_decisions(file)] == ["sure"]
    assert add_decision(file, decision(study="sure", verified=False, update="graph")), "as it now sees it"
    assert add_decision(file, decision(study="hasty", verified=False))
    assert [one.promise.study for one in read_decisions(file)] == ["hasty"]


def test_studies_that_end_at_once_lose_nothing(file: Path) -> None:
    """Each thread has the lock's file open for itself, as processes do."""
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def add(number: int) -> None:
        try:
            start.wait()
            for turn in range(4):
                config = load("nano", [f"model.layers={1 + 4 * turn + number}"])
                add_decision(file, decision(config, f"study {number}"), lock_seconds=math.inf)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(one.shape.layers for one in read_decisions(file)) == list(range(1, 17))


def test_a_lock_that_others_hold_is_not_waited_for_for_ever(file: Path) -> None:
    add_decision(file, decision())
    before = file.read_bytes()
    with file.with_name(".decisions.yaml.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="others have held its lock"):
            add_decision(file, decision(study="second"), lock_seconds=0.01)
    assert file.read_bytes() == before
    assert add_decision(file, decision(study="second"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decisions: [{}]\n", "decisions.0.shape is missing"),
        ("model: {layers: 2}\n", "model: there is no such key"),
        ("[", "this is no YAML"),
        ("schema_version: 2\ndecisions: []\n", "schema_version"),
    ],
)
def test_another_file_is_no_decision_file_and_is_not_written_over(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    for use in (lambda: read_decisions(file), lambda: add_decision(file, decision())):
        with pytest.raises(ConfigError, match=said):
            use()
    assert file.read_text() == text


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        add_decision(tmp_path / "file" / "decisions.yaml", decision())


def test_the_nearest_is_the_one_with_fewest_differences() -> None:
    far = decision(load("90m"), "far")
    near = decision(load("20m", ["training.tokens_per_update=32768"]), "near")
    found = nearest([far, near], Shape.of(load("20m")), HERE)
    assert found is not None
    assert found[0].promise.study == "near"
    assert found[1] == ["tokens_per_update 32768, here 131072"]
    assert nearest([], Shape.of(load("20m")), HERE) is None


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_training_takes_the_execution_decided_on_here_and_nothing_else(file: Path, said: list[str]) -> None:
    asked = load("nano", ["training.seed=3", "output.checkpoint=none"])
    add_decision(file, decision(load("nano"), place=place_here(), micro_batch_size=4, cpu_threads=2))
    followed = follow_decision(asked, file, ["training.seed=3"], said.append)
    assert (followed.execution.micro_batch_size, followed.execution.cpu_threads) == (4, 2)
    assert followed.recipe_identity == asked.recipe_identity
    assert followed.output == asked.output
    assert followed.tuned == promised(followed, 1.9e6, study="first").tuned, "which the training holds itself to"
    assert said == [
        f"{file}: the execution that study first decided on (2026-01-02); 1,890,500 to 1,909,500 targets/s are promised"
    ]
    assert follow_decision(asked, file.parent, [], said.append) == followed, "the folder of a study will do"


def test_what_was_compiled_is_looked_for_beside_the_decision_file(file: Path, said: list[str]) -> None:
    made = decision(load("nano"), place=place_here())
    code = {"file": "nano/candidates/c1.zip", "sha256": "0" * 64, "machine": "m", "source": "s"}
    promise = made.promise.model_validate(made.promise.model_dump(mode="json") | {"compiled": code})
    add_decision(file, made.model_copy(update={"promise": promise}))
    tuned = follow_decision(load("nano"), file, [], said.append).tuned
    assert tuned is not None
    assert tuned.compiled is not None
    assert tuned.compiled.file == str(file.parent / "nano/candidates/c1.zip")


def test_what_a_user_sets_of_the_execution_stays_set(file: Path, said: list[str]) -> None:
    add_decision(file, decision(load("nano"), place=place_here(), micro_batch_size=4, cpu_threads=2))
    own = "execution.cpu_threads=1"
    followed = follow_decision(load("nano", [own]), file, [own], said.append)
    assert (followed.execution.micro_batch_size, followed.execution.cpu_threads) == (4, 1)
    assert said[0].endswith("; execution.cpu_threads=1 as asked")


def test_where_none_matches_it_says_how_the_nearest_differs_and_goes_on(file: Path, said: list[str]) -> None:
    here = place_here()
    older = here.model_copy(update={"versions": here.versions | {"torch": "2.9.0"}})
    add_decision(file, decision(load("nano"), place=older, micro_batch_size=4))
    asked = load("nano")
    assert follow_decision(asked, file, [], said.append) == asked
    assert said == [
        f"{file}: no decision for this recipe here; the nearest, of study first, has torch 2.9.0, here "
        f"{here.versions['torch']}; goes on with the configuration's own execution"
    ]


def test_the_command_line_looks_into_the_file_before_it_trains(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("model: {}")
    arguments = ["--config", "nano", "--decisions", str(file), "--out", str(tmp_path / "run")]
    assert train(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: model: there is no such key")
    assert not (tmp_path / "run").exists()


def test_an_empty_file_of_decisions_is_said_and_a_missing_one_is_a_mistake(file: Path, said: list[str]) -> None:
    file.write_text("decisions: []\n")
    follow_decision(load("nano"), file, [], said.append)
    assert said[0].endswith("holds no decision yet; goes on with the configuration's own execution")
    with pytest.raises(ConfigError, match="no such file"):
        follow_decision(load("nano"), file.with_name("typo.yaml"), [], said.append)
