"""The launcher's decisions: which nodes are enough, what runs, what it is told."""

from pathlib import Path

import pytest

from tinyllm_ray.allocation import END_VARIABLE
from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster import launch as launching
from tinyllm_ray.cluster.driver import driver_environment
from tinyllm_ray.cluster.launch import Ended, build_parser, gather, launch, program
from tinyllm_ray.cluster.node import Node
from tinyllm_ray.cluster.steps import Steps, step_command
from tinyllm_ray.errors import ConfigError, NoResultError

NODES = ["n1", "n2", "n3"]


def steps(ready: list[str], ended: list[str] = []) -> Steps:  # noqa: B006 (only read)
    made = Steps(Path("logs"), "secret", ["true"])
    made.ready = {node: {"event": "ready"} for node in ready}
    made.ended = dict.fromkeys(ended, "it burned")
    return made


def in_time() -> Deadline:
    return Deadline(1.0, clock=lambda: 0.0)


def too_late() -> Deadline:
    return Deadline(1.0, clock=lambda: 2.0)


def test_all_nodes_are_enough_at_once() -> None:
    gather(steps(NODES), NODES, 3, in_time(), [])


def test_fewer_are_enough_once_the_others_have_failed_or_the_deadline_has_passed() -> None:
    gather(steps(["n1", "n3"], ["n2"]), NODES, 2, in_time(), [])
    gather(steps(["n1", "n3"]), NODES, 2, too_late(), [])


def test_too_few_are_told_at_once_where_the_rest_has_failed() -> None:
    with pytest.raises(NoResultError, match=r"^1 of 3 nodes are there; missing: n2 \(it burned\)$"):
        gather(steps(["n1"], ["n2"]), NODES, 3, in_time(), [])


def test_the_deadline_names_every_node_that_is_missing() -> None:
    with pytest.raises(NoResultError, match=r"missing: n2 \(it burned\), n3 \(no answer before the deadline\)$"):
        gather(steps(["n1"], ["n2"]), NODES, 2, too_late(), [])


def test_before_the_deadline_it_waits_for_those_that_may_come_until_a_signal() -> None:
    with pytest.raises(Ended):
        gather(steps(["n1", "n2"]), NODES, 2, in_time(), [15])


def test_a_step_that_ends_is_missing_with_sruns_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nread secret\necho 'srun: error: no way' >&2\necho more >&2\nexit 9\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = Steps(tmp_path, "secret", ["true"])
    made.start(Node(job=1, name="n1", head=None, cpus=1, gpus=0, memory_mib=0))
    with pytest.raises(NoResultError, match=r"missing: n1 \(its step ended with 9: no way\)$"):
        gather(made, ["n1"], 1, Deadline.after(60), [])


def test_a_step_that_nobody_at_slurm_answers_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 22.05 complains while slurmctld restarts."""
    unanswered = (
        "srun: error: Unable to confirm allocation for job 3: Unable to contact slurm controller (connect failure)"
    )
    (tmp_path / "srun").write_text(
        "#!/bin/sh\nread secret\n"
        f"if [ ! -e {tmp_path}/once ]; then touch {tmp_path}/once; echo '{unanswered}' >&2; exit 1; fi\n"
        'echo \'{"event": "ready", "address": "here:1"}\'\nread end\n'
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = Steps(tmp_path, "secret", ["true"])
    made.start(Node(job=1, name="n1", head=None, cpus=1, gpus=0, memory_mib=0))
    gather(made, ["n1"], 1, Deadline.after(60), [])
    assert made.ready["n1"]["address"] == "here:1"
    assert made.ended == {}
    made.end(["n1"], 10.0)


def test_a_step_whose_log_cannot_be_made_is_begun_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nread secret\necho \'{"event": "ready"}\'\nread end\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = Steps(tmp_path / "srun", "secret", ["true"])  # no folder
    made.start(Node(job=1, name="n1", head=None, cpus=1, gpus=0, memory_mib=0))
    gather(made, ["n1"], 1, Deadline.after(60), [])
    made.end(["n1"], 10.0)
    assert f"{tmp_path}/srun/n1.log: Not a directory; what the node says is lost" in capsys.readouterr().err


def test_what_runs_is_a_command_of_the_package_or_a_file() -> None:
    assert program(["tune", "--budget", "45m"]) == ["-m", "tinyllm_ray.tune", "--budget", "45m"]
    assert program(["--", "train", "evaluate", "--"]) == ["-m", "tinyllm_ray.train", "evaluate", "--"]
    assert program(["selfcheck", "--measure"]) == ["-m", "tinyllm_ray.cluster", "selfcheck", "--measure"]
    assert program(["mine.py", "-x"]) == ["mine.py", "-x"]
    for words in ([], ["--"], ["rm", "-rf"], ["cluster"]):
        with pytest.raises(ConfigError, match=r"tune, train, data, selfcheck or a FILE\.py"):
            program(words)


def test_options_after_the_command_are_the_commands() -> None:
    options = build_parser().parse_args(["--min-nodes", "2", "tune", "--min-nodes", "9", "--", "x"])
    assert options.min_nodes == 2
    assert program(options.command) == ["-m", "tinyllm_ray.tune", "--min-nodes", "9", "--", "x"]


def test_outside_of_a_job_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match=r"no Slurm job .*submit --help"):
        launch(build_parser().parse_args(["tune"]), [])


def test_a_slurm_that_does_not_answer_at_the_end_costs_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lines in (("scontrol", "echo JobId=7 Requeue=1"), ("squeue", "echo 'squeue: error: no' >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(launching, "on_cluster", lambda *_: 0)
    assert launch(build_parser().parse_args(["tune", "--budget", "45m"]), []) == 0
    assert capsys.readouterr().err == "cluster: squeue: no; the job does not go back into the queue by itself\n"


def test_a_step_has_all_that_the_job_has_on_its_node() -> None:
    command = step_command(Node(job=1, name="gh7", head=None, cpus=72, gpus=4, memory_mib=1000))
    assert {"--nodelist=gh7", "--cpus-per-task=72", "--gres=gpu:4", "--mem=1000M", "--overlap"} <= {*command}
    without = step_command(Node(job=1, name="gh7", head=None, cpus=1, gpus=0, memory_mib=0))
    assert "--gres=none" in without
    assert not [word for word in without if word.startswith("--mem")]


def test_the_command_knows_the_cluster_and_the_end_as_slurm_has_it_where_slurm_tells() -> None:
    head = {"address": "10.0.0.1:10068", "token": "/tmp/tr0-1/token"}
    variables = driver_environment({END_VARIABLE: "77"}, head, 600.0)
    assert variables["RAY_ADDRESS"] == "10.0.0.1:10068"
    assert variables["RAY_AUTH_TOKEN_PATH"] == "/tmp/tr0-1/token"
    assert variables[END_VARIABLE] == "77"
    assert int(driver_environment({}, head, 600.0)[END_VARIABLE]) > 1_700_000_000
    assert END_VARIABLE not in driver_environment({}, head, None)
