"""`python -m tinyllm_ray.cluster`: what it prints without a Slurm, and how it ends."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tinyllm_ray.cluster.__main__ import main
from tinyllm_ray.cluster.launch import build_parser

SUBMIT = ["submit", "--nodes", "4", "--gpus-per-node", "4", "--time", "1:00:00", "--account", "proj42"]
TUNE = ["--", "tune", "--budget", "45m", "--out", "my studies/20m"]


def test_a_dry_run_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SUBMIT, "--dry-run", "--min-nodes", "3", *TUNE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("nodes=4", "gpus-per-node=4", "time=1:00:00", "account=proj42", "output=tinyllm-%j.log"):
        assert lines.count(f"#SBATCH --{option}") == 1
    assert "set -- tune --budget 45m --out 'my studies/20m'" in lines
    assert "options=(--min-nodes=3)" in lines
    assert f"python={sys.executable}" in lines
    assert lines[-1].startswith("exec ")
    assert "symmetric-run" not in "".join(lines)


def test_a_job_comes_back_only_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, last in (([], "--no-requeue"), (["--requeue"], "--requeue")):
        assert main([*SUBMIT, *asked, "--dry-run", *TUNE]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "requeue" in line][-1] == f"#SBATCH {last}"


def test_the_command_line_goes_before_the_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("account: theirs\npartition: gh200\ngpus_per_node: 4\nsbatch: [--exclusive]\ninterface: hsn0\n")
    assert main(["submit", "--site", str(site), "--account", "mine", "--sbatch=--qos=x", "--dry-run", *TUNE]) == 0
    printed = capsys.readouterr().out
    options = [line.removeprefix("#SBATCH ") for line in printed.splitlines() if line.startswith("#SBATCH ")]
    assert options[-6:] == [
        *("--nodes=1", "--account=mine", "--partition=gh200", "--gpus-per-node=4", "--exclusive", "--qos=x"),
    ]
    assert "options=(--interface=hsn0)" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", "--nodes", "0", *TUNE], "--nodes: 0 is not allowed"),
        (["submit", "--nodes", "2", "--min-nodes", "3", *TUNE], "--min-nodes: 3 is not allowed; give 1 to 2"),
        (["submit", "--time", "soon", *TUNE], "--time: Slurm time: 'soon'"),
        (["submit", "--start-deadline", "5", *TUNE], "--start-deadline: '5' is not a duration"),
        (["submit", "--account", "a b", *TUNE], "--account: 'a b' is not allowed"),
        (["submit", "--sbatch=exclusive", *TUNE], "'exclusive' is not allowed"),
        (["submit", "--site", "nowhere.yaml", *TUNE], "--site: 'nowhere.yaml' is neither a shipped site"),
        (["submit", "--nodes", "2"], "'no command': what to run"),
        (["submit", "--", "rm", "-rf"], "'rm': what to run"),
        (["submit", "--", "tune", "--out", "x"], "tune: a study needs a budget"),
        (["submit", "--", "tune", "--budget=soon"], "--budget: 'soon' is not a duration"),
        (["submit", "--", "mine.py"], "'mine.py': there is no such file here"),
        (["submit", "--", "tune", "a\nb"], r"argument: 'a\nb' is not allowed"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], "--dry-run", *arguments[1:]]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*TUNE[1:], "--nonsense"], "unrecognized arguments: --nonsense; see python -m tinyllm_ray.tune --help"),
        ([*TUNE[1:], "--out"], "argument --out: expected one argument; see python -m tinyllm_ray.tune --help"),
        (["train", "--config", "nano"], "the following arguments are required: --out; see python -m tinyllm_ray.train"),
        (["data", "prepare"], "the following arguments are required: --out; see python -m tinyllm_ray.data prepare"),
        (["selfcheck", "--mesure"], "unrecognized arguments: --mesure; see python -m tinyllm_ray.cluster"),
    ],
)
def test_options_that_the_command_does_not_take_are_said_before_the_queue(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["submit", "--dry-run", "--", *command])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", [["tune", "report", "studies/20m"], ["train", "evaluate", "runs/20m", "--subset"]])
def test_commands_beside_a_programs_own_are_submitted_with_their_own_options(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--dry-run", "--", *command]) == 0
    assert f"set -- {' '.join(command)}\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["submit", *TUNE], ["status"], ["status", "1"], ["logs", "1"], ["cancel", "1"]])
def test_where_there_is_no_slurm_it_says_so(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(arguments) == 2
    assert "is not on the PATH; run this where Slurm's commands are" in capsys.readouterr().err


def test_the_tunnel_goes_through_the_sites_login_host_and_else_through_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("login: login.example.org\n")
    assert main([*SUBMIT, "--site", str(site), "--dry-run", *TUNE]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("options=(")][-1:]
    login = build_parser().parse_args([*shlex.split(line.removeprefix("options=(").rstrip(")")), "tune"]).login

    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho JobId=7 JobState=RUNNING NodeList=n1 StdOut={tmp_path}/tinyllm-7.log\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    record = {"head": "n1", "nodes": {}, "token": "/tmp/token", "dashboard_port": 5, "login": login}
    (tmp_path / "tinyllm-7").mkdir()
    (tmp_path / "tinyllm-7" / "cluster.json").write_text(json.dumps(record))
    for named, host in (([], "login.example.org"), (["--login", "gate"], "gate")):
        assert main(["dashboard", "7", *named]) == 0
        assert f"ssh -N -L 5:127.0.0.1:5 -J {host} n1\n" in capsys.readouterr().out


def test_neither_ray_nor_torch_is_imported_and_the_launcher_needs_the_standard_library_alone() -> None:
    code = "import sys, {}; print([name for name in ('ray', 'torch', 'pydantic', 'yaml') if name in sys.modules])"
    for module, allowed in (("__main__", ["pydantic", "yaml"]), ("launch", []), ("node", [])):
        done = subprocess.run(
            [sys.executable, "-c", code.format(f"tinyllm_ray.cluster.{module}")],
            check=True,
            text=True,
            capture_output=True,
        )
        assert done.stdout.strip() == str(allowed)
