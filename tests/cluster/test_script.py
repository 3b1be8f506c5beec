"""The submitted script holds what was asked for and nothing that was smuggled in."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyllm_ray.cluster.script import Request, render
from tinyllm_ray.errors import ConfigError

TEMPLATE = (Path(__file__).parents[2] / "cluster" / "ray_cluster.sbatch").read_text()
PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), max_size=20)
NASTY = st.sampled_from(
    ["", "it's", 'a "b"', "$(touch x)", "`touch x`", "a;b", "\\", "*", "-x", "--", "#SBATCH --x", "é"]
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter, in a folder with a space, that prints the words it got, each ended by a zero."""
    path = tmp_path_factory.mktemp("a folder") / "python"
    path.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    path.chmod(0o755)
    return path


def run(script: str, folder: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["bash", "-s", "--", *arguments], cwd=folder, input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(PRINTABLE | NASTY, max_size=6), launch=st.lists(PRINTABLE | NASTY, max_size=3))
def test_every_word_arrives_as_it_was_given(python: Path, words: list[str], launch: list[str]) -> None:
    script = render(TEMPLATE, Request(["tune", *words], {"nodes": "2"}, python=str(python), launch=launch))
    assert run(script, python.parent) == ["-m", "tinyllm_ray.cluster.launch", *launch, "tune", *words]
    assert sorted(path.name for path in python.parent.iterdir()) == ["python"]


@given(st.sampled_from(["account", "partition", "constraint", "mem", "time"]), st.text(max_size=20))
def test_an_option_of_sbatch_is_plain_or_refused(name: str, value: str) -> None:
    plain = render(TEMPLATE, Request(["tune"], {name: "x"}, python="p"))
    try:
        script = render(TEMPLATE, Request(["tune"], {name: value}, python="p"))
    except ConfigError as error:
        assert f"--{name}" in str(error)  # noqa: PT017 (a refusal is one of the two right answers)
        assert "\n" not in str(error)  # noqa: PT017
        assert not re.fullmatch(r"[A-Za-z0-9_.-]+", value)
    else:
        assert script == plain.replace(f"#SBATCH --{name}=x\n", f"#SBATCH --{name}={value}\n")
        assert not re.search(r"[\s'\"\\#$`;]", value)


@pytest.mark.parametrize(
    "request_",
    [
        Request(["tune"], {"account": "a\n#SBATCH --uid=0"}),
        Request(["tune"], {"account": "a --uid=0"}),
        Request(["tune"], {"account": ""}),
        Request(["tune"], {}, further=["--comment=a --uid=0"]),
        Request(["tune"], {}, further=["exclusive"]),
        Request(["tune", "a\nb"], {}),
        Request(["tune"], {}, modules=["a\nb"]),
        Request(["tune"], {}, setup=["a\nb"]),
        Request(["tune"], {}, python="a\0b"),
        Request(["tune"], {}, launch=["a\rb"]),
    ],
)
def test_what_could_become_a_line_or_an_option_of_its_own_is_refused(request_: Request) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        render(TEMPLATE, request_)


def test_options_stand_before_the_first_command_where_sbatch_reads_them() -> None:
    script = render(TEMPLATE, Request(["tune"], {"nodes": "2", "mem": "0"}, further=["--exclusive"], python="p"))
    lines = script.splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert max(options) < first_command
    assert [lines[number] for number in options[-3:]] == ["#SBATCH --nodes=2", "#SBATCH --mem=0", "#SBATCH --exclusive"]
    assert not [line for line in lines if line in ("# [options]", "# [site]")]


def test_a_sites_lines_run_first_and_its_modules_are_loaded(python: Path) -> None:
    lines = ["module() { printf '<%s>\\0' \"$@\"; }", "export SITE=1"]
    script = render(TEMPLATE, Request(["tune"], {}, setup=lines, modules=["cuda/12.6", "a b"], python=str(python)))
    assert run(script, python.parent)[:4] == ["<load>", "<cuda/12.6>", "<load>", "<a b>"]


def test_the_shipped_script_runs_as_it_is(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLLM_RAY_PYTHON", str(python))
    assert run(TEMPLATE, python.parent, "tune", "--budget", "45m") == [
        *("-m", "tinyllm_ray.cluster.launch"),
        *("tune", "--budget", "45m"),
    ]


def test_a_script_that_lost_its_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no line '# \[site\]'"):
        render(TEMPLATE.replace("# [site]\n", ""), Request(["tune"], {}))
