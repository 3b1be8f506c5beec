"""The README is true: its commands parse, its example runs, its files and presets exist."""

import re
import shlex
from pathlib import Path

import pytest
from command_line import ONE_CANDIDATE

import tinyllm_ray.cluster.__main__ as cluster_command
import tinyllm_ray.data.__main__ as data_command
import tinyllm_ray.train.__main__ as train_command
import tinyllm_ray.train.convert as convert
import tinyllm_ray.tune.__main__ as tune_command
import tinyllm_ray.tune.again.command as again_command
import tinyllm_ray.tune.page.command as page_command
import tinyllm_ray.tune.page.run as run
from tinyllm_ray.config import load, preset_names
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.train.evaluate_command import evaluate_parser
from tinyllm_ray.tune import TuneResult

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PARSERS = {
    "tinyllm_ray.cluster": cluster_command.build_parser,
    "tinyllm_ray.data": data_command.build_parser,
    "tinyllm_ray.train": train_command.build_parser,
    "tinyllm_ray.tune": tune_command.build_parser,
}
COMMANDS = {
    "tinyllm_ray.train": {
        "evaluate": evaluate_parser,
        "export": convert.export_parser,
        "import": convert.import_parser,
        "report": run.report_parser,
    },
    "tinyllm_ray.tune": {
        "report": page_command.report_parser,
        "rerun": again_command.rerun_parser,
        "validate": again_command.validate_parser,
    },
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Module and arguments of every command line of the package that the README shows."""
    lines = [part for block in blocks("sh") for line in block.splitlines() for part in line.split(" && ")]
    words = [shlex.split(line) for line in lines if "-m tinyllm_ray." in line]
    return [(line[line.index("-m") + 1], line[line.index("-m") + 2 :]) for line in words]


def test_it_shows_every_command() -> None:
    assert {module for module, _ in commands()} == set(PARSERS)


@pytest.mark.parametrize(("module", "arguments"), commands())
def test_a_command_parses(module: str, arguments: list[str]) -> None:
    own = COMMANDS.get(module, {})
    if arguments[0] in own:
        own[arguments[0]]().parse_args(arguments[1:])
    else:
        PARSERS[module]().parse_args(arguments)


def test_it_shows_every_command_beside_training_and_tuning() -> None:
    assert set(COMMANDS["tinyllm_ray.train"]) == set(train_command.COMMANDS)
    assert set(COMMANDS["tinyllm_ray.tune"]) == set(tune_command.COMMANDS)
    assert all(f"{module} {name} " in README for module, names in COMMANDS.items() for name in names)


def test_the_first_screen_has_one_command_to_run_and_one_to_test() -> None:
    run, test = (block.strip() for block in blocks("sh")[:2])
    for command in (run, test):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert "\n" not in command
    assert run.endswith(" -m tinyllm_ray.tune --budget 3m")
    assert test.endswith(" -m pytest")
    assert README.index(test) < 2500


def test_its_configuration_is_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "pack.yaml").write_text(text)
    assert load(tmp_path / "pack.yaml").packing.models == 3


def test_presets_and_spaces_named_in_it_exist() -> None:
    (listed,) = re.findall(r"`--preset` names one\s+\((.*?)\)", README, flags=re.DOTALL)
    assert re.findall("`(.*?)`", listed) == preset_names()
    for path in re.findall(r"search_spaces/[a-z]+\.yaml", README):
        assert (ROOT / path).is_file()


@pytest.mark.long
def test_the_python_example_runs(built_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, str(built_root))
    names: dict = {}
    assert 'load_space("smoke")' in code
    # The space it names would take all of its three minutes; one candidate ends by itself, on a busy machine later.
    (tmp_path / "one.yaml").write_text(ONE_CANDIDATE)
    assert 'budget="3m"' in code
    code = code.replace('load_space("smoke")', 'load_space("one.yaml")').replace('budget="3m"', 'budget="20m"')
    exec(compile(code, "README.md", "exec"), names)
    result = names["result"]
    assert isinstance(result, TuneResult)
    assert result.baseline == result.records[0]
    assert result.selected in result.records
    assert result.config.execution.model_dump(mode="json") == result.selected.execution
    table = result.to_pandas()
    assert list(table["candidate"]) == [record.candidate for record in result.records]
    assert TuneResult.read("studies/nano") == result
