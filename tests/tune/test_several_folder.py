"""The folder of studies that share a budget: whose it is, how each stands after a session, and its page."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import Finished

from tinyllm_ray.errors import ConfigError, TinyllmRayError
from tinyllm_ray.tune.again.recorded import open_study
from tinyllm_ray.tune.budget import spent_seconds
from tinyllm_ray.tune.page.command import report_command
from tinyllm_ray.tune.page.index import write_index
from tinyllm_ray.tune.page.text import TIMES
from tinyllm_ray.tune.page.write import read_study
from tinyllm_ray.tune.preset_names import folder_name, preset_list, study_folders
from tinyllm_ray.tune.several_folder import Standing, begin_whole, open_whole, read_whole, study_figures, write_whole
from tinyllm_ray.tune.tuner import TuneResult

PRESETS = ["20m", "recipes/mine.yaml", "90m"]
NAMES = ["20m", "mine", "90m"]


def states(standings: list[Standing]) -> list[str]:
    return [one.state for one in standings]


def write_study(folder: Path, **summary: Any) -> None:
    """A study's summary as `report.Report` writes it, with an answer."""
    folder.mkdir(parents=True)
    candidates = [
        {"candidate": "c1", "label": "mb32 compiled <auto>", "seconds": 20.0},
        {"candidate": "c2", "label": "mb32 graph", "seconds": None},
    ]
    written = {
        "study": "20260102-030405-abcdef",
        "parameters": 20_403_520,
        "targets_per_update": 131_072,
        "selected": {"candidate": "c1", "targets_per_second": 1.9e6},
        "speedup": {"ratio": 1.101, "low": 1.09, "high": 1.112, "pairs": 3, "verified": True},
        "candidates": candidates,
        "elapsed_seconds": 300.0,
        "ended": "space exhausted",
        "budget_exhausted": False,
    }
    (folder / "summary.json").write_text(json.dumps(written | summary))


def used(seconds: float) -> list[dict[str, Any]]:
    """One session."""
    return [{"session": "one", "began": 0.0, "seconds": seconds, "ended": True}]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "all"
    begin_whole(folder, PRESETS)
    return folder


def test_names_are_taken_apart_and_an_empty_one_is_a_mistake() -> None:
    assert preset_list(None) == []
    assert preset_list("20m, 50m") == ["20m", "50m"]
    for text in ("", "20m,", ",20m", "20m,,50m"):
        with pytest.raises(ConfigError, match="leaves a name out"):
            preset_list(text)


def test_each_study_has_a_folder_of_its_name() -> None:
    assert [folder_name(preset) for preset in PRESETS] == NAMES
    assert study_folders(Path("out"), PRESETS) == [Path("out") / name for name in NAMES]
    assert study_folders(Path("out"), []) == [Path("out")], "a single study is OUT itself"


def test_a_name_that_is_there_twice_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--presets: mine is there twice"):
        open_whole(tmp_path / "all", ["mine.yaml", "others/mine.yaml"], False)


def test_a_recipe_whose_folder_would_be_the_wholes_own_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be called 'sessions'; rename the recipe's file"):
        open_whole(tmp_path / "all", ["20m", "mine/sessions.yaml"], False)


@pytest.mark.parametrize("resume", [False, True])
def test_all_wait_where_nothing_is_there_and_nothing_is_written(tmp_path: Path, resume: bool) -> None:
    assert states(open_whole(tmp_path / "all", PRESETS, resume)) == ["waiting"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "resume", "said"),
    [
        (["study.yaml"], False, "holds one study; name its recipe with --preset"),
        (["study.yaml"], True, "holds one study"),
        (["notes.txt"], False, "not an empty folder"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, files: list[str], resume: bool, said: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=said):
        open_whole(tmp_path, PRESETS, resume)


def test_studies_are_not_begun_anew_and_are_gone_on_with_as_they_were(out: Path) -> None:
    with pytest.raises(ConfigError, match="already holds studies; add --resume"):
        open_whole(out, PRESETS, False)
    with pytest.raises(ConfigError, match=r"the presets are 20m,90m, were 20m,recipes/mine\.yaml,90m"):
        open_whole(out, ["20m", "90m"], True)
    assert states(open_whole(out, PRESETS, True)) == ["waiting"] * 3, "killed before the first summary"


def test_what_ran_was_cut_what_was_left_out_may_fit_now_and_what_was_done_stays_done(out: Path) -> None:
    ended = [Standing("20m", "done", "space exhausted", 300.0), Standing("mine", "left out", "no"), Standing("90m")]
    write_whole(out, ended, 600.0, used(333.0), "every recipe was studied")
    assert states(open_whole(out, PRESETS, True)) == ["done", "waiting", "waiting"]
    ended[1].state, ended[2].state = "short", "running"
    write_whole(out, ended, 600.0, used(444.0), None)
    again = open_whole(out, PRESETS, True)
    assert states(again) == ["done", "short", "interrupted"]
    assert again[0] == ended[0]
    assert spent_seconds(out) == 444.0, "where the command line looks for what is left of the budget"


def test_a_studys_figures_are_those_of_its_own_summary_and_none_where_it_has_none(out: Path) -> None:
    write_study(out / "20m")
    found = study_figures(out / "20m")
    assert (found["selected"], found["targets_per_second"], found["trials"]) == ("mb32 compiled <auto>", 1.9e6, 1)
    assert found["speedup"]["low"] == 1.09
    nothing = study_figures(out / "mine")
    assert not any(nothing.values())
    assert nothing.keys() == found.keys()


class Words(HTMLParser):
    """Text and links of a page; fails where a script or a remote file is asked for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        links = [value or "" for name, value in attributes if name in ("href", "src")]
        assert not [link for link in links if link.startswith(("http", "//"))]
        self.links += links if tag == "a" else []

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_page_lists_every_study_with_its_answer_or_why_it_has_none(out: Path) -> None:
    write_study(out / "20m")
    standings = [
        Standing("20m", "done", "space exhausted", 400.0),
        Standing("mine", "left out", "its baseline <alone> is expected to take 900 s, and its share is 100 s"),
        Standing("90m", "running", None, 200.0),
    ]
    write_whole(out, standings, 600.0, used(301.0), None)
    page = Words(write_index(out).read_text())
    assert page.links == ["decisions.yaml", "20m/report.html"]
    assert "20.4M parameters, 131,072 targets an update" in page.text
    assert "mb32 compiled <auto> 20.4M parameters" in page.text
    assert "throughput 1.9 M targets/s" in page.text
    assert f"over its baseline 1.101{TIMES} 1.090{TIMES} to 1.112{TIMES} with 90%" in page.text
    assert "No answer Left out: its baseline <alone> is expected to take 900 s" in page.text
    assert "Under way" in page.text
    write_whole(out, standings, 600.0, used(601.0), "the budget's end")
    assert "Ended: the budget's end" in Words(write_index(out).read_text()).text


def test_the_report_command_makes_the_list_again(out: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_whole(out, [Standing(name) for name in NAMES], 600.0, used(1.0), None)
    assert report_command([str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out / 'index.html'}: ")
    assert report_command([str(out), "--csv", str(tmp_path / "all.csv")]) == 2
    assert "holds several studies; name one of its folders" in capsys.readouterr().err


@pytest.mark.parametrize("use", [TuneResult.read, read_study, open_study])
def test_what_is_of_one_study_names_those_that_lie_there(out: Path, use: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigError, match="several studies lie here; name one of them: none has begun yet"):
        use(out)
    write_study(out / "20m")
    (out / "20m" / "study.yaml").touch()
    with pytest.raises(ConfigError, match=f"name one of them: {out / '20m'}$"):
        use(out)


@pytest.mark.parametrize("listed", ["5", "[1]", "{}", "null"])
def test_a_damaged_list_is_said(out: Path, listed: str) -> None:
    (out / "presets.yaml").write_text(f"presets: {listed}")
    with pytest.raises(ConfigError, match=r"presets\.yaml: damaged: it holds no list of presets"):
        read_study(out)


def test_a_damaged_summary_is_said(out: Path) -> None:
    (out / "summary.json").write_text('{"study": "one"}')
    with pytest.raises(ConfigError, match="this is no summary of several studies"):
        read_whole(out)
    (out / "summary.json").write_text("{")
    with pytest.raises(TinyllmRayError, match="damaged"):
        open_whole(out, PRESETS, True)


MISTAKES = [
    (["--presets", "20m,,50m"], "leaves a name out"),
    (["--presets", "nano,20m", "--decisions", "damaged.yaml"], "damaged.yaml: the file is a list"),
]


@pytest.mark.usefixtures("neither_torch_nor_ray")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--presets", "nano,21m"], "'21m' is neither a preset"),
        *(pytest.param(*mistake, marks=pytest.mark.slow) for mistake in MISTAKES),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_ray_is_started(
    run_module: Any, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "damaged.yaml").write_text("[]")
    done: Finished = run_module("tinyllm_ray.tune", "--budget", "60s", "--out", "all", *arguments, cwd=tmp_path)
    assert done.status == 2, done.output
    assert len(done.output.strip().splitlines()) == 1
    assert done.output.startswith("error: ")
    assert said in done.output
    assert not (tmp_path / "all").exists()
