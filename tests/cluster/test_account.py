"""What a job's GPU seconds went to, from Slurm's three sources and the study's own records."""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.cluster.__main__ import main
from tinyllm_ray.cluster.account import PHASES, account_of, ending, jobs_of, lines, phases_of, read_study
from tinyllm_ray.cluster.accounting import JobRun, job_runs, resized_since
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import GpuState, Seconds, TrialRecord, Window

BEGIN = datetime.fromisoformat("2026-11-30T10:00:00").timestamp()

# What Slurm 22.05.8 with slurmdbd said of jobs of this package's: one that handed a node back, one at its limit, one
# that was requeued, one cancelled before it began, and the two tasks of an array, which it gives for the last one's
# number.
_SHARE = "billing=2,cpu=2,energy=49140,gres/gpu=1,mem=3000M,node=1"
RESIZED = """RESIZING|0:0|2026-11-30T07:30:32|2026-11-30T07:32:30|2|cpu=4,energy=19740,mem=6000M,node=2|19740|3
COMPLETED|0:0|2026-11-30T07:32:30|2026-11-30T07:38:22|1|billing=2,cpu=2,energy=98700,mem=3000M,node=1|98700|3
"""
LIMITED = f"TIMEOUT|0:0|2026-11-30T07:35:33|2026-11-30T07:36:51|1|{_SHARE}|17220|8\n"
REQUEUED = """REQUEUED|0:0|2026-11-30T07:35:33|2026-11-30T07:36:49|1|billing=1,cpu=1,gres/gpu=1,mem=1500M,node=1||9
RUNNING|0:0|2026-11-30T07:37:06|Unknown|1|billing=1,cpu=1,gres/gpu=1,mem=1500M,node=1||9
"""
NEVER = "CANCELLED by 0|0:0|None|2026-11-30T07:36:50|1||0|10\n"
ARRAY = f"""CANCELLED by 0|0:0|2026-11-30T07:31:35|2026-11-30T07:35:26|1|{_SHARE}|49140|5
FAILED|3:0|2026-11-30T07:31:35|2026-11-30T07:32:18|1|{_SHARE}|8610|4
"""
# The same job in the completion file, its last run and the one before it.
RESIZED_COMPLETIONS = """RESIZING|0:0|2026-11-30T07:32:30|2026-11-30T07:32:30|2||
COMPLETED|0:0|2026-11-30T07:32:30|2026-11-30T07:38:22|1||
"""
FULL = """PREEMPTED|0:0|2026-11-30T10:00:00|2026-11-30T10:10:00|4|billing=288,cpu=288,gres/gpu=16,node=4||7
COMPLETED|0:0|2026-11-30T10:20:00|2026-11-30T10:50:00|4|billing=288,cpu=288,energy=7200000,gres/gpu=16,node=4|7200000|7
"""
# With jobcomp/filetxt alone; a job that was preempted once.
COMPLETIONS = """PREEMPTED|0:0|2026-11-30T10:00:00|2026-11-30T10:10:00|1||
PENDING|0:0|2026-11-30T10:20:00|2026-11-30T10:50:00|1||
CANCELLED|0:0|2026-11-30T10:51:00|2026-11-30T10:51:00|0||
"""
SHOWN = (
    "JobId=7 JobName=tinyllm JobState=TIMEOUT Reason=TimeLimit Requeue=0 Restarts=0 ExitCode=0:15 "
    "StartTime=2026-11-30T10:00:00 EndTime=2026-11-30T11:00:00 NumNodes=2 TRES=cpu=16,node=2,gres/gpu=8"
)


class Slurm:
    """Slurm's commands that answer by the options they are called with; without an answer they refuse."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers

    def __call__(self, *command: str) -> str:
        name = "completion" if "--completion" in command else command[0]
        if name not in self.answers:
            raise ConfigError(f"{command[0]}: Slurm accounting storage is disabled")
        return self.answers[name]


def trial(at: float, total: float, purpose: str = "search", joules: float | None = None, job: str = "7") -> TrialRecord:
    gpu = None if joules is None else GpuState(energy_joules=joules)
    window = Window(
        index=0,
        updates=1,
        targets=1,
        seconds=1,
        targets_per_second=1,
        data_wait_seconds=0,
        loss=1,
        grad_norm=1,
        timestamp=at,
        gpu=gpu,
    )
    fields: dict[str, Any] = {
        "study": "s",
        "candidate": "c",
        "kind": "measurement",
        "fate": "complete",
        "recipe_identity": "r",
        "execution_identity": "e",
        "cache_identity": None,
        "source_identity": "s",
        "source_dirty": None,
        "execution": {},
        "windows": [window],
        "environment": {"slurm": {"SLURM_JOB_ID": job}},
    }
    seconds = Seconds(start=2, compile=3, warmup=4, windows=5, proof=6, total=total)
    return TrialRecord(**fields, purpose=purpose, seconds=seconds, timestamp=BEGIN + at)  # type: ignore[arg-type]


def test_every_run_of_a_job_is_found_by_the_first_source_that_knows_one() -> None:
    runs, source = job_runs(7, Slurm(sacct=FULL, completion=COMPLETIONS, scontrol=SHOWN))
    assert source == "sacct"
    assert [run.state for run in runs] == ["PREEMPTED", "COMPLETED"]
    assert [(run.gpus, run.nodes, run.joules) for run in runs] == [(16, 4, None), (16, 4, 7_200_000)]
    assert (runs[1].begin, runs[1].end) == (BEGIN + 1200, BEGIN + 3000)


def test_a_data_bases_rows_are_runs_with_their_devices_and_energy() -> None:
    (wide, narrow), _ = job_runs(3, Slurm(sacct=RESIZED))
    assert ([wide.nodes, narrow.nodes], [wide.gpus, narrow.gpus]) == ([2, 1], [0, 0])
    account = account_of([], [wide, narrow], devices=2, unit="node")
    assert account.allocated == 2 * 118 + 352
    assert (account.slurm_joules, account.unmetered) == (19740 + 98700, 0)
    (limited,), _ = job_runs(8, Slurm(sacct=LIMITED))
    assert (limited.state, limited.gpus, limited.joules) == ("TIMEOUT", 1, 17220)
    first, second = job_runs(9, Slurm(sacct=REQUEUED))[0]
    assert (first.state, second.state, second.end) == ("REQUEUED", "RUNNING", None)
    assert job_runs(10, Slurm(sacct=NEVER)) == ([], "nobody"), "one that never began"


def test_energy_that_slurm_does_not_tell_of_a_run_is_said_to_be_missing() -> None:
    runs = [*job_runs(9, Slurm(sacct=REQUEUED))[0][:1], *job_runs(8, Slurm(sacct=LIMITED))[0]]
    account = account_of([], runs, devices=1, unit="GPU")
    assert "energy by Slurm's counters of whole nodes: 0.005 kWh, without 1 run(s)" in lines(account)
    assert account_of([], runs[:1], devices=1, unit="GPU").unmetered == 0, "where none is counted there is no line"


def test_of_an_array_one_task_counts() -> None:
    assert [run.state for run in job_runs(4, Slurm(sacct=ARRAY))[0]] == ["FAILED"]
    assert [run.state for run in job_runs(5, Slurm(sacct=ARRAY))[0]] == ["CANCELLED by 0"]


def test_the_completion_file_does_not_know_when_what_was_handed_back_began() -> None:
    runs, _ = job_runs(3, Slurm(completion=RESIZED_COMPLETIONS))
    resized = datetime.fromisoformat("2026-11-30T07:32:30").timestamp()
    assert resized_since(runs, None) == runs
    wide, narrow = resized_since(runs, resized - 118)
    assert (wide.begin, wide.end, narrow) == (resized - 118, resized, runs[1])
    twice = resized_since([runs[0], replace(runs[0], begin=resized + 60, end=resized + 60), runs[1]], resized - 118)
    assert [run.begin for run in twice] == [resized - 118, resized, resized]
    assert resized_since(runs, resized + 300) == runs, "of a run before it came back"


def test_without_a_data_base_it_is_the_completion_records_and_else_what_slurmctld_remembers() -> None:
    runs, source = job_runs(7, Slurm(completion=COMPLETIONS, scontrol=SHOWN))
    assert source == "sacct -c"
    assert [(run.state, run.gpus) for run in runs] == [("PREEMPTED", None), ("REQUEUED", None)], "one never began"
    (run,), source = job_runs(7, Slurm(sacct="\n", scontrol=SHOWN))
    assert (source, run) == ("scontrol", JobRun("TIMEOUT", "0:15", BEGIN, BEGIN + 3600, 2, 8, None))
    assert job_runs(7, Slurm()) == ([], "nobody")
    assert job_runs(7, Slurm(scontrol="JobState=PENDING StartTime=2026-11-30T10:00:00"))[0] == []
    running = SHOWN.replace("TIMEOUT", "RUNNING")
    assert job_runs(7, Slurm(scontrol=running))[0][0].end is None, "the end that Slurm tells is the limit's"


def test_seconds_are_by_phase_and_those_of_verification_by_themselves() -> None:
    phases = phases_of([trial(0, 25), trial(30, 21, purpose="verification")])
    assert phases == {"start": 2, "compile": 3, "warmup": 4, "windows": 5, "proof": 6, "verify": 21, "other": 5}
    assert tuple(phases) == PHASES


def test_what_no_trial_held_is_idle_before_between_and_after() -> None:
    runs = [
        JobRun("PREEMPTED", None, BEGIN, BEGIN + 100, 1, 2, None),
        JobRun("X", None, BEGIN + 200, BEGIN + 300, 1, 2, None),
    ]
    records = [trial(10, 40), trial(10, 80), trial(220, 50)]
    account = account_of(records, runs, devices=2, unit="GPU")
    assert account.allocated == 400
    assert account.idle == 400 - 170
    # Two GPUs wait 10 s and 20 s for a run's first trial, and 10 s and 30 s after its last one.
    assert account.idle_parts == {"before the first trial": 60, "between trials": 90, "after the last": 80}
    text = "\n".join(lines(account))
    assert "idle               230 GPU s    57.5%" in text
    assert "allocated 0.11 GPU hours on 2 GPU(s)" in text


def test_a_node_that_was_handed_back_counts_until_then() -> None:
    resized = """RESIZING|0:0|2026-11-30T10:00:00|2026-11-30T10:01:40|4||
COMPLETED|0:0|2026-11-30T10:01:40|2026-11-30T10:03:20|1||
"""
    runs, _ = job_runs(7, Slurm(completion=resized))
    account = account_of([trial(0, 100)], runs, devices=4, unit="node")
    assert account.allocated == 4 * 100 + 100


def test_without_slurm_the_studys_own_record_is_all() -> None:
    account = account_of([trial(0, 25, joules=3.6e6)], [], devices=1, unit="GPU")
    assert (account.allocated, account.idle, account.idle_parts) == (None, None, {})
    assert "energy by the windows alone: 1.000 kWh" in lines(account)
    assert ending([], "nobody").startswith("Slurm knows no more of this job")


def test_a_run_that_slurm_forgot_is_no_negative_idleness() -> None:
    runs = [JobRun("COMPLETED", "0:0", BEGIN, BEGIN + 30, 1, 1, None)]
    account = account_of([trial(0, 25), trial(-500, 25)], runs, devices=1, unit="GPU")
    assert "the trials used 20 GPU s more than Slurm accounts: it lacks a run" in lines(account)


def test_energy_is_counted_where_anything_counts_it() -> None:
    runs, _ = job_runs(7, Slurm(sacct=FULL))
    account = account_of([trial(0, 25), trial(30, 25, joules=1000.0)], runs, devices=16, unit="GPU")
    assert (account.trial_joules, account.slurm_joules) == (1000.0, 7_200_000)
    assert account_of([trial(0, 25)], runs[:1], 16, "GPU").slurm_joules is None


def test_a_study_knows_its_jobs_and_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    assert jobs_of([trial(0, 1), trial(1, 1, job="9"), trial(2, 1)]) == [7, 9]
    assert jobs_of([trial(0, 1, job="")]) == []
    with pytest.raises(ConfigError, match="holds no study's records"):
        read_study(tmp_path)


def test_studies_that_share_a_budget_are_accounted_for_together(tmp_path: Path) -> None:
    (tmp_path / "presets.yaml").touch()
    with pytest.raises(ConfigError, match="holds no study's records"):
        read_study(tmp_path)
    for name, seconds in (("20m", 10.0), ("50m", 30.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trials.jsonl").write_text(trial(0, total=seconds).model_dump_json() + "\n")
        (tmp_path / name / "summary.json").write_text(json.dumps({"gpus": 4, "ended": "space exhausted"}))
    (tmp_path / "summary.json").write_text(json.dumps({"ended": "every recipe was studied", "studies": []}))
    study = read_study(tmp_path)
    assert [record.seconds.total for record in study.records] == [10.0, 30.0]
    assert (study.summary["gpus"], study.summary["ended"]) == (4, "every recipe was studied")


def test_the_command_needs_no_slurm_for_a_studys_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "trials.jsonl").write_text(trial(0, 25).model_dump_json() + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"ended": "space exhausted", "gpus": 2, "nodes": 1}))
    assert main(["account", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "job 7: Slurm knows no more of this job" in said
    assert f"study {tmp_path}: space exhausted" in said
    assert "windows              5 GPU s    20.0%" in said
    assert main(["account", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["phases"]["windows"] == 5
    assert main(["account", "999"]) == 2
    assert capsys.readouterr().err.startswith("error: Slurm knows no run of job 999, and it left no study here")
