"""A job whose first node went down is ended from another one, and no other job is."""

import socket
from collections.abc import Iterator

import pytest

from tinyllm_ray.cluster.headless import end_headless, is_headless
from tinyllm_ray.errors import ConfigError

WHOLE = "JobId=7 JobState=RUNNING Requeue=0 NodeList=n[1-3] BatchHost=n1 NumNodes=3"
HEADLESS = "JobId=7 JobState=RUNNING Requeue=0 NodeList=n[2-3] BatchHost=n1 NumNodes=2"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


class Slurm:
    def __init__(self, *answers: str) -> None:
        self.answers, self.told = list(answers), list[tuple[str, ...]]()

    def __call__(self, *command: str) -> str:
        if command[:2] != ("scontrol", "show"):
            self.told.append(command)
            return ""
        answer = self.answers.pop(0)
        if not answer:
            raise ConfigError("scontrol: Unable to contact slurm controller")
        return answer


def test_it_is_headless_once_slurm_has_taken_the_scripts_node_out() -> None:
    assert is_headless(HEADLESS)
    assert not is_headless(WHOLE)
    assert not is_headless("JobId=7 JobState=COMPLETED NodeList=n[2-3]")


def test_it_waits_for_slurm_and_then_cancels_or_requeues(silent: str) -> None:
    slurm = Slurm(WHOLE, "", WHOLE, HEADLESS)
    assert end_headless(7, silent, lambda: False, ask=slurm)
    assert slurm.told == [("scancel", "7")]
    slurm = Slurm(HEADLESS.replace("Requeue=0", "Requeue=1"))
    assert end_headless(7, silent, lambda: False, ask=slurm)
    assert slurm.told == [("scontrol", "requeue", "7")]


def test_of_an_array_one_task_alone_is_ended(silent: str) -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    slurm = Slurm(HEADLESS)
    assert end_headless(7, silent, lambda: False, ask=slurm, environment=task)
    assert slurm.told == [("scancel", "7_2")]


def test_where_the_head_answers_or_the_launcher_lets_go_the_job_is_left_alone(silent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        slurm = Slurm()
        assert not end_headless(7, f"127.0.0.1:{head.getsockname()[1]}", lambda: False, ask=slurm)
    waits = iter([False, False, True])
    slurm = Slurm(WHOLE, WHOLE)
    assert not end_headless(7, silent, lambda: next(waits), ask=slurm)
    assert slurm.told == []
