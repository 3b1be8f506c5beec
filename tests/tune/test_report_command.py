"""`tune report`: the page again, tables, and two studies beside each other."""

from pathlib import Path

import pandas
import pytest
from page_studies import BEGAN, h200_first_study, record, write_study

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.tune.__main__ import main
from tinyllm_ray.tune.page.compare import compare, differences


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study", *h200_first_study())


def test_the_page_is_made_again_from_the_records(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(study)]) == 0
    assert (study / "report.html").read_text().startswith("<!doctype html>")
    assert str(study / "report.html") in capsys.readouterr().out


def test_csv_and_parquet_hold_a_row_a_trial_with_the_same_figures(study: Path, tmp_path: Path) -> None:
    csv, parquet = tmp_path / "t.csv", tmp_path / "t.parquet"
    assert main(["report", str(study), "--csv", str(csv), "--parquet", str(parquet)]) == 0
    records, _ = h200_first_study()
    for frame in (pandas.read_csv(csv), pandas.read_parquet(parquet)):
        assert list(frame.candidate) == [one.candidate for one in records]
        assert list(frame.targets_per_second) == pytest.approx([one.targets_per_second for one in records])
        assert list(frame.sdpa_backend)[-1] == "cudnn"
        assert frame.peak_reserved_bytes[0] == records[0].memory.peak_reserved_bytes


def test_columns_of_several_types_and_missing_settings_are_exported(tmp_path: Path) -> None:
    records = [
        record("c01", 1000.0, BEGAN, execution={"cpu_threads": 8}),
        record("c02", 1000.0, BEGAN, execution={"cpu_threads": "all", "extra": [1, 2]}),
    ]
    study = write_study(tmp_path / "study", records, {})
    assert main(["report", str(study), "--parquet", str(tmp_path / "t.parquet")]) == 0
    assert list(pandas.read_parquet(tmp_path / "t.parquet").cpu_threads) == ["8", "all"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["report", "nowhere"], "error: nowhere: there is no study here"),
        (["report", "{study}", "nowhere"], "error: nowhere: there is no study here"),
        (["report", "{study}", "--csv", "no/folder/t.csv"], "error: --csv no/folder/t.csv: the folder does not exist"),
        (["report", "{study}", "--parquet", "."], "error: --parquet .: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    study: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([one.format(study=study) for one in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(why)
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["reprot"], ["report"], ["report", "a", "b", "--csv", "x"]])
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_damaged_records_are_named_by_their_line(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "trials.jsonl").write_text('{"candidate": "c01"}\n')
    assert main(["report", str(study)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_two_studies_are_compared_by_the_executions_they_share(tmp_path: Path) -> None:
    one = [record(f"c{index}", rate, BEGAN, execution={"n": index}) for index, rate in enumerate((1e6, 1e6, 1e6, 9e6))]
    two = [record(f"d{index}", rate, BEGAN, execution={"n": index}) for index, rate in enumerate((1.2e6, 1.001e6, 9e5))]
    found = compare(one, two)
    assert [(entry.candidate, round(entry.ratio, 3), entry.differs) for entry in found] == [
        ("c0", 1.2, True),
        ("c1", 1.001, False),
        ("c2", 0.9, True),
    ]
    assert all(entry.low < entry.ratio < entry.high for entry in found)


def test_studies_of_different_recipes_or_without_a_common_execution_are_not_compared() -> None:
    one = [record("c0", 1e6, BEGAN, execution={"n": 0})]
    with pytest.raises(ConfigError, match="no execution in common"):
        compare(one, [record("c0", 1e6, BEGAN, execution={"n": 1})])
    with pytest.raises(ConfigError, match="different recipes"):
        compare(one, [one[0].model_copy(update={"recipe_identity": "other"})])


def test_what_differs_beside_the_executions_is_named() -> None:
    one = [record("c0", 1e6, BEGAN, environment={"versions": {"torch": "2.11"}, "threads": {"OMP": "1"}})]
    two = [record("c0", 1e6, BEGAN, environment={"versions": {"torch": "2.13"}, "threads": {"OMP": "2"}})]
    assert differences(one, two) == [("versions.torch", "2.11", "2.13")]
    assert differences(one, one) == []


def test_the_comparison_says_ratio_and_noise(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(study), str(study)]) == 0
    out = capsys.readouterr().out
    assert "1.000x" in out
    assert "no difference shown" in out
    assert "10 executions in common" in out
