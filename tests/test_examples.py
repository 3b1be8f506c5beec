"""The public docstrings: every example in them runs as it stands, and they render to pages."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
from api_pages import PUBLIC, write_pages

import tinyllm_ray
import tinyllm_ray.tune
from tinyllm_ray.config import load
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.records import Fate, TrialRecord

PACKAGE = Path(tinyllm_ray.__file__).parent
SLOW = {
    "tinyllm_ray.tune.tuner.Tuner",
    "tinyllm_ray.tune.tuner.tune_presets",
    "tinyllm_ray.cluster.connect.connect",
}
"""They start Ray; all but the last run studies."""


def _examples() -> list[doctest.DocTest]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>>" in path.read_text():
            name = ".".join(("tinyllm_ray", *path.relative_to(PACKAGE).with_suffix("").parts))
            # Nothing is there but what the example imports, as for somebody who copies it.
            tests = doctest.DocTestFinder().find(importlib.import_module(name), globs={"__name__": "__main__"})
            found += [test for test in tests if test.examples]
    return found


EXAMPLES = _examples()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder of a study of nano, as far as it is read again."""
    config = load("nano")
    execution = config.execution.model_dump(mode="json")
    record = TrialRecord(
        study="s",
        candidate="c01-mb8-eager-auto-t2",
        kind="measurement",
        fate=Fate.COMPLETE,
        recipe_identity=config.recipe_identity,
        execution_identity="e",
        cache_identity=None,
        source_identity="i",
        source_dirty=None,
        execution=execution,
        targets_per_second=8000.0,
        timestamp=0.0,
    )
    folder = tmp_path / "studies" / "nano"
    folder.mkdir(parents=True)
    figures = {"candidate": record.candidate}
    summary = {"baseline": figures, "selected": figures, "speedup": {"ratio": 1.0, "verified": False}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "trials.jsonl").write_text(record.model_dump_json() + "\n")
    (folder / "selected.yaml").write_text(config.to_yaml())
    return folder


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.name in SLOW else []) for one in EXAMPLES],
)
def test_an_example_runs_as_it_stands(
    example: doctest.DocTest,
    study: Path,
    built_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(built_root))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = tmp_path
    if example.name.endswith((".Tuner", ".tune_presets")):  # its studies begin
        folder = tmp_path / "empty"
        folder.mkdir()
    monkeypatch.chdir(folder)
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not failed, capsys.readouterr().out


def test_what_people_import_first_has_an_example() -> None:
    with_one = {example.name.rpartition(".")[2] for example in EXAMPLES}
    assert set(tinyllm_ray.tune.__all__) | {"Config", "load", "open_cache", "Llama", "Trainer"} <= with_one
    modules = {".".join(example.name.split(".")[:-1]) for example in EXAMPLES}
    public = {getattr(tinyllm_ray.tune, name).__module__ for name in tinyllm_ray.tune.__all__} | set(PUBLIC)
    assert modules <= public, "an example is of what people use"


def test_the_public_docstrings_render_to_pages(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_pages(tmp_path)
    assert [str(warning.message) for warning in recwarn if "tinyllm_ray" in str(warning.message)] == []
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert pages == {"index.html", "tinyllm_ray.html", *(f"{name.replace('.', '/')}.html" for name in PUBLIC)}
    tune = (tmp_path / "tinyllm_ray" / "tune.html").read_text()
    assert set(tinyllm_ray.tune.__all__) <= set(re.findall(r'id="(\w+)"', tune))
    front = (tmp_path / "tinyllm_ray.html").read_text()
    headings = re.findall(r"^## (.*)$", (PACKAGE.parent / "README.md").read_text(), flags=re.MULTILINE)
    assert all(heading in front for heading in [*headings, "Public modules"])
    assert all(f'href="{name.replace(".", "/")}.html"' in front for name in PUBLIC)
