"""`python -m tinyllm_ray.cluster account`: from a job's number or a study's folder to its account."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster import jobs
from tinyllm_ray.cluster.account import GpuAccount, StudyUse, account_of, ending, jobs_of, lines, read_study
from tinyllm_ray.cluster.accounting import JobRun, job_runs, resized_since
from tinyllm_ray.command import say
from tinyllm_ray.errors import ConfigError


def account_command(what: str, as_json: bool) -> None:
    """Print the account of a job, by its number, or of a study, by its folder. Raises ConfigError for neither."""
    job = int(what) if what.isascii() and what.isdecimal() else None
    cluster = _cluster(job) if job is not None else {}
    study = _study(cluster) if job is not None else read_study(Path(what))
    numbers = [job] if job is not None else jobs_of(study.records if study else [])
    told = [(number, *_runs(number)) for number in numbers]
    if study is None and not any(runs for _, runs, _ in told):
        raise ConfigError(f"Slurm knows no run of job {what}, and it left no study here; ask where it was submitted")
    runs = [run for _, found, _ in told for run in found]
    account = _account(study, runs, cluster, job)
    if as_json:
        say(json.dumps({"jobs": {str(number): [asdict(run) for run in found] for number, found, _ in told}, **account}))
        return
    for number, found, source in told:
        say(f"job {number}: {ending(found, source)}")
    if study is not None:
        say(f"study {study.folder}: {study.summary.get('ended') or 'did not end by itself'}")
    if account["account"] is not None:
        for line in lines(GpuAccount(**account["account"])):
            say(line)


def _runs(job: int) -> tuple[list[JobRun], str]:
    runs, source = job_runs(job)
    return (resized_since(runs, _cluster(job).get("began")), source) if source == "sacct -c" else (runs, source)


def _account(
    study: StudyUse | None, runs: list[JobRun], cluster: dict[str, Any], job: int | None
) -> dict[str, dict[str, Any] | None]:
    """The account of the study's trials in these runs; all of them where the job is not the question."""
    if study is None:
        return {"account": None}
    records = [record for record in study.records if job is None or job in jobs_of([record])]
    nodes = cluster.get("nodes", {}).values()
    gpus = study.summary.get("gpus") or sum(node["gpus"] for node in nodes)
    gpus = next((run.gpus for run in reversed(runs) if run.gpus), gpus)
    count = max((run.nodes for run in runs), default=0) or study.summary.get("nodes") or 1
    return {"account": asdict(account_of(records, runs, gpus or count, "GPU" if gpus else "node"))}


def _cluster(job: int) -> dict[str, Any]:
    """What the launcher wrote of the job's cluster; nothing where neither Slurm nor this folder knows it."""
    try:
        known = jobs.show(job)
    except ConfigError:
        known = jobs.Job(job, "UNKNOWN", None, None, None, Path(f"tinyllm-{job}.log"))
    try:
        return jobs.cluster_record(known)
    except ConfigError:
        return {}


def _study(cluster: dict[str, Any]) -> StudyUse | None:
    """The study that a job's command ran; None where it ran another, or never came to a record."""
    try:
        return read_study(Path(cluster["study"])) if cluster.get("study") else None
    except ConfigError:
        return None
