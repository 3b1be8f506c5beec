"""What a resumption may not change is refused with the field, both values and what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.config import load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import SourceIdentity
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.space import load_space
from tinyllm_ray.tune import folder
from tinyllm_ray.tune.folder import Definition, Earlier, begin_study, open_folder, refuse_early
from tinyllm_ray.tune.request import StudyRequest, check_request
from tinyllm_ray.yamlfile import dump_yaml, read_mapping

SOURCE = SourceIdentity("a" * 64, "1" * 40, dirty=False)


@pytest.fixture(autouse=True)
def one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "source_identity", lambda: SOURCE)


def request_of(out: Path, **asked: Any) -> StudyRequest:
    values = {"budget": "1m", "budget_seconds": 60.0, "total_seconds": 60.0, "age_seconds": 0.0, "out": str(out)}
    return StudyRequest(**{**values, "recipe": "nano", "space": "smoke", **asked})


def begin(
    out: Path, earlier: Earlier | None = None, *, cores: int = 2, device: str = "cpu", **asked: Any
) -> Definition:
    machine = {name: asked.pop(name) for name in ("accelerators", "cache_identity") if name in asked}
    request = request_of(out, **asked)
    config, space, _ = check_request(request).for_machine(device)
    return begin_study(out, earlier, config, fit_space(space, config, device, cores), request, **machine)


def refusal(out: Path, **changed: Any) -> str:
    """Of a session that asks for something else than the study in `out`, which is left as it is."""
    earlier = open_folder(out, resume=True)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        begin(out, earlier, **changed)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--resume: {out} holds a study of something else: ")
    assert message.endswith("; ask for what it was, or begin a study in another folder with --out")
    return message.removeprefix(f"--resume: {out} holds a study of something else: ").rpartition("; ask for")[0]


def test_of_two_that_begin_at_once_in_one_folder_one_does(tmp_path: Path) -> None:
    """Both looked before Ray started, and saw nothing."""
    out = tmp_path / "study"
    assert open_folder(out, resume=False) is open_folder(out, resume=True) is None
    begin(out, budget="1m")
    first = (out / "study.yaml").read_bytes()
    with pytest.raises(ConfigError, match="another study has begun there meanwhile; choose another folder"):
        begin(out, budget="2m")
    assert (out / "study.yaml").read_bytes() == first


def test_the_same_again_goes_on(tmp_path: Path) -> None:
    machine = {"accelerators": ("H200",), "cache_identity": "c" * 64}
    definition = begin(tmp_path / "study", **machine)
    earlier = open_folder(tmp_path / "study", resume=True)
    assert earlier is not None
    assert begin(tmp_path / "study", earlier, budget="2h", runs=7, **machine) == definition
    refuse_early(earlier, check_request(request_of(tmp_path / "study")), tmp_path / "study")


@pytest.mark.parametrize(
    ("first", "then", "difference"),
    [
        ({}, {"overrides": ["optimizer.weight_decay=0.3"]}, "optimizer.weight_decay is 0.3, was 0.1"),
        (
            {"overrides": ["packing.models=2", "packing.variants=[{seed: 1}, {seed: 2}]"]},
            {"overrides": ["packing.models=2", "packing.variants=[{seed: 1}, {seed: 3}]"]},
            "packing.variants.1.seed is 3, was 2",
        ),
        ({"space": "smoke"}, {"space": "execution"}, "space is execution, was smoke; space "),
        ({}, {"protocol": {"windows": 5}}, "space protocol.windows is 5, was 3"),
        ({}, {"protocol": {"data_mode": "synthetic"}}, "space protocol.data_mode is synthetic, was real"),
        ({}, {"cores": 1}, "cores a trial may use is 1, was 2; space baseline.cpu_threads is 1, was 2; space factors"),
        ({}, {"device": "cuda"}, "device is cuda, was cpu"),
        (
            {"device": "cuda", "accelerators": ("H200",)},
            {"device": "cuda", "accelerators": ("H100",)},
            "device is cuda (H100), was cuda (H200)",
        ),
        (
            {"cache_identity": "1" * 64},
            {"cache_identity": "2" * 64},
            f"token cache (data.cache) is {'2' * 12}, was {'1' * 12}",
        ),
    ],
    ids=["recipe", "packs", "space", "protocol", "data mode", "cores", "device", "accelerator", "tokens"],
)
def test_a_change_is_named_with_both_values(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], difference: str
) -> None:
    begin(tmp_path / "study", **first)
    assert difference in refusal(tmp_path / "study", **then)


def test_a_space_file_that_was_edited_is_named_by_its_factor(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("baseline: {}\nfactors: {micro_batch_size: [2, 4]}\n")
    begin(tmp_path / "study", space=str(file))
    file.write_text("baseline: {}\nfactors: {micro_batch_size: [2, 8]}\n")
    assert refusal(tmp_path / "study", space=str(file)) == "space factors.micro_batch_size is [2, 8], was [2, 4]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SourceIdentity("b" * 64, "1" * 40, dirty=True), f"{'b' * 12} (revision {'1' * 12} with changes)"),
        (SourceIdentity("b" * 64, "2" * 40, dirty=False), f"{'b' * 12} (revision {'2' * 12} without changes)"),
        (SourceIdentity("b" * 64, None, dirty=None), "b" * 12),
    ],
)
def test_another_source_is_named_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: SourceIdentity, words: str
) -> None:
    begin(tmp_path / "study")
    monkeypatch.setattr(folder, "source_identity", lambda: source)
    was = f"{'a' * 12} (revision {'1' * 12} without changes)"
    assert refusal(tmp_path / "study") == f"source of tinyllm_ray is {words}, was {was}"


def test_the_same_files_under_another_revision_are_the_same_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after committing them."""
    begin(tmp_path / "study")
    monkeypatch.setattr(folder, "source_identity", lambda: SourceIdentity("a" * 64, "2" * 40, dirty=True))
    assert begin(tmp_path / "study", open_folder(tmp_path / "study", resume=True))


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    begin(tmp_path / "study")
    said = refusal(tmp_path / "study", overrides=["training.seed=7"], protocol={"windows": 4})
    assert re.search(r"seed is 7, was \d+; space protocol\.windows is 4, was 3", said)


def test_what_another_cache_or_cut_may_be_is_no_other_recipe(tmp_path: Path) -> None:
    """Where the same tokens lie, and where a run is cut, is free."""
    begin(tmp_path / "study")
    earlier = open_folder(tmp_path / "study", resume=True)
    assert begin(tmp_path / "study", earlier, overrides=["training.max_updates=9"])


def test_it_is_refused_before_ray_starts_where_it_can_be(tmp_path: Path) -> None:
    out = tmp_path / "study"
    begin(out)
    earlier = open_folder(out, resume=True)
    assert earlier is not None
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay is 0\.3, was 0\.1"):
        refuse_early(earlier, check_request(request_of(out, overrides=["optimizer.weight_decay=0.3"])), out)
    refuse_early(earlier, check_request(request_of(out, space=None)), out)  # smoke is this machine's default


def test_a_study_that_an_earlier_program_began_goes_on(tmp_path: Path) -> None:
    """Its definition lacks what is compared today."""
    out = tmp_path / "study"
    begin(out)
    values = read_mapping(out / "study.yaml")
    for name in ("settled_space", "cores", "device_kind", "accelerators", "cache_identity", "source"):
        del values[name]
    (out / "study.yaml").write_text(dump_yaml(values))
    earlier = open_folder(out, resume=True)
    assert earlier is not None
    assert begin(out, earlier, cache_identity="c" * 64)
    refuse_early(earlier, check_request(request_of(out, protocol={"windows": 9})), out)
    assert refusal(out, protocol={"windows": 9}) == "space, with its protocol, is smoke, was another (smoke)"


def test_a_recipe_of_another_version_is_refused_by_its_identity(tmp_path: Path) -> None:
    """It may have settings that are none here."""
    out = tmp_path / "study"
    begin(out)
    values = read_mapping(out / "study.yaml")
    values["recipe"]["model"]["gone"] = 1
    values["recipe_identity"] = "f" * 64
    (out / "study.yaml").write_text(dump_yaml(values))
    assert re.fullmatch("recipe identity is [0-9a-f]{12}, was ffffffffffff", refusal(out))


def test_the_definition_says_what_is_compared(tmp_path: Path) -> None:
    definition = begin(tmp_path / "study", accelerators=("H200",), cache_identity="c" * 64)
    assert definition.source == {"sha256": "a" * 64, "revision": "1" * 40, "dirty": False}
    assert definition.settled_space is not None
    assert definition.settled_space["factors"] == json.loads(
        json.dumps(fit_space(load_space("smoke"), load("nano"), "cpu", cores=2).factors)
    )
    assert Definition.model_validate(read_mapping(tmp_path / "study" / "study.yaml")) == definition
