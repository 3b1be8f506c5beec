"""Slurm's answers, read; its refusals, passed on in one line."""

from pathlib import Path

import pytest

from tinyllm_ray.cluster.jobs import (
    AWAY_SECONDS,
    Job,
    ask_patiently,
    ask_slurm,
    await_log,
    cluster_record,
    log_folder,
    of_job,
    own_name,
    parse_accounting,
    parse_job,
    parse_queue,
    refusal,
)
from tinyllm_ray.errors import ConfigError


def test_a_refusal_is_one_line_without_repeats() -> None:
    text = "sbatch: error: no such: x\nsbatch: error: no such: x\n\nslurm_load_jobs error: Invalid job id\n"
    assert refusal(text) == "no such: x; Invalid job id"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sh", "-c", "echo 'sh: error: one' >&2; echo two >&2; exit 1"], "^sh: sh: error: one; two$"),
        (["sh", "-c", "exit 4"], "^sh: exit status 4$"),
        (["no-such-command"], "^no-such-command is not on the PATH"),
    ],
)
def test_a_command_that_fails_is_the_users_to_know(command: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask_slurm(*command)


def test_a_commands_answer_is_its_output_and_it_reads_what_it_is_given() -> None:
    assert ask_slurm("cat", text="#!/bin/bash\n") == "#!/bin/bash\n"


def test_a_users_own_view_of_slurm_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as `relative` are no dates, and a filter of squeue hides the job whose time left is asked for."""
    for name, value in {"SLURM_TIME_FORMAT": "relative", "SQUEUE_STATES": "PD", "SLURM_CONF": "here"}.items():
        monkeypatch.setenv(name, value)
    told = dict(line.split("=", 1) for line in ask_slurm("env", "-0").split("\0") if "=" in line)
    assert told["SLURM_TIME_FORMAT"] == "standard"
    assert "SQUEUE_STATES" not in told
    assert told["SLURM_CONF"] == "here"


def test_a_waiting_job_has_a_reason_and_no_nodes() -> None:
    text = (
        "JobId=4 JobName=tinyllm JobState=PENDING Reason=PartitionTimeLimit TimeLimit=00:10:00 NodeList=(null) "
        "StdOut=/a/t-4.log"
    )
    assert parse_job(4, text) == Job(4, "PENDING", "PartitionTimeLimit", None, "00:10:00", Path("/a/t-4.log"))


def test_a_job_is_active_until_it_has_ended_for_good() -> None:
    states = ["PENDING", "RUNNING", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"]
    assert [parse_job(4, f"JobId=4 JobState={state}").active for state in states] == [True] * 3 + [False] * 5


def test_a_job_long_gone_is_known_by_its_last_run() -> None:
    text = "PREEMPTED|n[1-2]|/home/u\nCANCELLED by 1000|n1|/home/u\n"
    assert parse_accounting(9, text) == Job(9, "CANCELLED", "by 1000", "n1", None, Path("/home/u/tinyllm-9.log"))
    with pytest.raises(ConfigError, match="Slurm knows no job 9"):
        parse_accounting(9, "")


def test_a_log_is_waited_for_as_long_as_its_job_may_write_it(tmp_path: Path) -> None:
    states, log = ["PENDING", "PENDING", "RUNNING", "CANCELLED"], tmp_path / "tinyllm-7.log"

    def look() -> Job:
        state = states.pop(0)
        if state == "RUNNING":
            log.touch()
        return Job(7, state, None, None, None, log)

    await_log(log, look, sleep=lambda seconds: None)
    assert states == ["CANCELLED"], "it is not asked again once the log is there"
    log.unlink()
    with pytest.raises(ConfigError, match=r"tinyllm-7\.log is not there; job 7 is CANCELLED$"):
        await_log(log, look, sleep=lambda seconds: None)


def test_a_queue_has_a_row_a_job_whatever_its_name() -> None:
    assert parse_queue("3|RUNNING|9:59|n[1-2]|a|b\n") == [("3", "RUNNING", "9:59", "n[1-2]", "a|b")]


def test_a_jobs_folder_stands_beside_its_log() -> None:
    assert log_folder("WorkDir=/a StdOut=/b c/tinyllm-7.log Power=", 7) == Path("/b c/tinyllm-7")
    assert log_folder("WorkDir=/a b StdOut=/dev/null Power=", 7) == Path("/a b/tinyllm-7")


def test_a_job_without_a_cluster_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job 7 is PENDING and has no cluster yet"):
        cluster_record(Job(7, "PENDING", None, None, None, tmp_path / "tinyllm-7.log"))


def test_a_task_of_an_array_is_called_by_its_own_name() -> None:
    assert own_name({"SLURM_JOB_ID": "12"}) == "12"
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "14", "SLURM_ARRAY_TASK_ID": "3"}
    assert own_name(array) == "14_3"


def test_an_arrays_number_is_its_last_tasks_and_of_the_others_nothing_is_read() -> None:
    """Slurm 22.05, `scontrol show job --oneliner 4` for `--array=1-2`, shortened."""
    text = (
        "JobId=4 ArrayJobId=4 ArrayTaskId=2 JobName=tinyllm JobState=FAILED NodeList=n2 StdOut=/w/tinyllm-4.log \n"
        "JobId=5 ArrayJobId=4 ArrayTaskId=1 JobName=tinyllm JobState=RUNNING NodeList=n1 StdOut=/w/tinyllm-5.log \n"
    )
    assert of_job(4, text) == text.splitlines()[0]
    task = parse_job(5, text)
    assert (task.state, task.nodes, task.log) == ("RUNNING", "n1", Path("/w/tinyllm-5.log"))
    assert (task.task, parse_job(4, text).task) == ("4_1", None), "the array's own number ends all of it"
    assert of_job(7, "JobState=RUNNING") == "JobState=RUNNING"


class Away:
    """A Slurm that does not answer the first few times, and a clock that its waits advance."""

    def __init__(self, times: int, words: str = "Unable to contact slurm controller (connect failure)") -> None:
        self.times, self.words, self.now = times, words, 0.0

    def ask(self, *command: str) -> str:
        self.now += 18.0  # as long as squeue tries by itself
        if self.times:
            self.times -= 1
            raise ConfigError(f"squeue: {self.words}")
        return " ".join(command)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def patiently(self, stop: bool = False) -> str:
        return ask_patiently("squeue", stop=lambda: stop, ask=self.ask, clock=lambda: self.now, sleep=self.wait)


def test_a_slurmctld_that_restarts_is_waited_for() -> None:
    assert Away(3).patiently() == "squeue"
    gone = Away(1000)
    with pytest.raises(ConfigError, match="Unable to contact slurm controller"):
        gone.patiently()
    assert AWAY_SECONDS <= gone.now < AWAY_SECONDS + 60


def test_a_refusal_or_a_signal_is_not_waited_out() -> None:
    refused = Away(1, "Invalid job id specified")
    with pytest.raises(ConfigError, match="Invalid job id"):
        refused.patiently()
    ended = Away(1)
    with pytest.raises(ConfigError):
        ended.patiently(stop=True)
    assert refused.now == ended.now == 18.0
