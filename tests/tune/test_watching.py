"""A study while it runs: its figures on Ray's metrics endpoint and in Prometheus, its trials' names, its callbacks.

One study of the tiny model is held in its first candidate, whose process is stopped, until all has been looked at.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import ray
from command_line import TINY_RECIPE
from ray.tune.logger import LoggerCallback, TBXLoggerCallback
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.metrics import GPU_GAUGES, STUDY_GAUGES
from tinyllm_ray.cluster.trials import run_trials
from tinyllm_ray.config import Config
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.space import parse_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.table import table_row
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.watching import watched
from tinyllm_ray.yamlfile import parse_yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
SIZE = "0.5M"
FIRST = f"{SIZE} mb8 eager auto t1"


SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {sdpa_backend: [auto, math]}
protocol: {data_mode: synthetic, warmup_updates: 1, windows: 2, updates_per_window: 2}
"""


class Notes(LoggerCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, Mapping[str, Any]]] = []
        self.results: list[dict[str, Any]] = []
        self.ends: list[str] = []

    def log_trial_start(self, trial: Any) -> None:
        self.starts.append((str(trial), trial.config))

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self.results.append(result)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self.ends.append(str(trial))


class Broken(LoggerCallback):
    """Somebody's logger whose server is down."""

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        raise ConnectionError("no route to the server\nmore")


class HeldDriver(StudyDriver):
    """Stops the process of the first candidate at its first window; `stopped` then says so."""

    stopped = threading.Event()
    pid = 0

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "forked" and not self.pid:
            self.pid = event["pid"]
        if event["event"] == "window" and not self.stopped.is_set():
            os.kill(self.pid, signal.SIGSTOP)
            super().hear(candidate, event)
            self.stopped.set()
            return
        super().hear(candidate, event)


@dataclass
class Seen:
    """What was seen of the study while its first candidate was stopped, and what it left."""

    metrics: str
    titles: set[str]
    prometheus: dict[str, list[Any]] | None
    """Answers by query; None without Prometheus."""
    said: str
    notes: Notes
    records: list[TrialRecord]
    out: Path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("study")
    (out / "candidates").mkdir()
    config = Config.model_validate(parse_yaml(TINY_RECIPE, "recipe"))
    space = parse_space(parse_yaml(SPACE, "space"), "space")
    fitted = fit_space(space, config, "cpu", cores=2)
    driver = HeldDriver(Study(fitted), "the study", config, None, out, Deadline.after(1000))
    report = Report(out, "the study", config, 1200.0, lambda: 1.0)
    notes = Notes()
    with (out / "said").open("w") as said, connect(None) as connection, ThreadPoolExecutor() as pool:
        console = Console(file=said, width=200)
        callbacks = [Broken(), notes, TBXLoggerCallback]

        def run() -> None:
            with watched(driver, report, callbacks, console) as guards:
                run_trials(driver, connection, out / "candidates", out / "tune", None, guards)

        study = pool.submit(run)
        _until(lambda: driver.stopped.is_set() or study.done())
        assert driver.stopped.is_set(), study.result()
        try:
            metrics, titles = _metrics_of_a_study(), _titles_of_workers(connection)
            prometheus = _ask_prometheus(out) if shutil.which("prometheus") else None
        finally:
            os.kill(driver.pid, signal.SIGCONT)
        study.result()
    records = [record for row in driver.rows() if (record := driver.record(row.candidate))]
    return Seen(metrics, titles, prometheus, (out / "said").read_text(), notes, records, out)


def _until(look: Callable[[], Any]) -> Any:
    """What `look` gives, once it gives something."""
    while not (found := look()):
        time.sleep(0.2)
    return found


def _metrics_of_a_study() -> str:
    (node,) = ray.nodes()

    def look() -> str | None:
        with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as page:
            text = page.read().decode()
        return text if all(f"ray_{name}{{" in text for name in ALWAYS) else None

    return str(_until(look))


def _titles_of_workers(connection: Connection) -> set[str]:
    """As the dashboard's page of the node lists them; asked until one of them is a candidate's."""
    (node,) = ray.nodes()
    token = subprocess.run(["ray", "get-auth-token"], capture_output=True, text=True, check=True).stdout.split()[-1]
    request = urllib.request.Request(
        f"{connection.dashboard}/nodes/{node['NodeID']}", headers={"Authorization": f"Bearer {token}"}
    )

    def look() -> set[str] | None:
        with urllib.request.urlopen(request) as page:
            workers = json.load(page)["data"]["detail"]["workers"]
        titles = {" ".join(worker["cmdline"]).strip() for worker in workers}
        return titles if any(SIZE in title for title in titles) else None

    found: set[str] = _until(look)
    return found


ALWAYS = set(STUDY_GAUGES) - {
    *("tinyllm_best_targets_per_second", "tinyllm_baseline_targets_per_second"),
    "tinyllm_candidate_targets_per_second",
}
"""What a study exports before its first record."""


def _ask_prometheus(folder: Path) -> dict[str, list[Any]]:
    """Answers to the dashboard's queries from Prometheus with the shipped settings.

    Those of what is always exported are asked until they have one; the others may have none, but have to be queries.
    """
    settings = (
        (CLUSTER / "prometheus.yml").read_text().replace("RAY_FOLDER", f"{tempfile.gettempdir()}/ray-{os.getuid()}")
    )
    (folder / "prometheus.yml").write_text(settings)
    with contextlib.ExitStack() as ending:
        address = _until(lambda: _start_prometheus(folder, ending))

        def look(query: str) -> list[Any]:
            with urllib.request.urlopen(f"http://{address}/api/v1/query?{urlencode({'query': query})}") as page:
                answer: list[Any] = json.load(page)["data"]["result"]
            return answer

        return {
            query: _until(functools.partial(look, query)) if _names(query) <= ALWAYS else look(query)
            for query in _queries()
        }


def _start_prometheus(folder: Path, ending: contextlib.ExitStack) -> str | None:
    """Its address once it answers; None where somebody else took the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=series"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], cwd=folder, stderr=log)
    ending.callback(process.wait)
    ending.callback(process.kill)
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready"):
            return address
        time.sleep(0.1)
    return None


def _queries() -> list[str]:
    """Of the Grafana dashboard, with every study chosen."""
    panels = json.loads((CLUSTER / "grafana_dashboard.json").read_text())["panels"]
    return [target["expr"].replace("$study", ".*") for panel in panels for target in panel["targets"]]


def _names(query: str) -> set[str]:
    return set(re.findall(r"\bray_(tinyllm_\w+)", query))


def _value(metrics: str, name: str, **labels: str) -> float:
    """Of the one sample with these labels."""
    lines = re.findall(rf"^ray_{name}\{{(.*)\}} (\S+)$", metrics, flags=re.MULTILINE)
    (value,) = (value for tags, value in lines if all(f'{key}="{text}"' in tags for key, text in labels.items()))
    return float(value)


def test_the_endpoint_tells_the_budget_the_running_candidate_and_the_trials(seen: Seen) -> None:
    study = {"study": "the study"}
    assert 0 < _value(seen.metrics, "tinyllm_budget_left_seconds", **study) < 1000
    assert _value(seen.metrics, "tinyllm_budget_seconds", **study) == 1200
    assert _value(seen.metrics, "tinyllm_running", candidate=FIRST, **study) == 1
    assert _value(seen.metrics, "tinyllm_trials", fate="complete", **study) == 0


def test_the_dashboard_names_a_trials_process_for_people(seen: Seen) -> None:
    assert f"ray::{FIRST}" in seen.titles


def test_prometheus_reads_it_with_the_shipped_settings(seen: Seen) -> None:
    if seen.prometheus is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    (running,) = next(answer for query, answer in seen.prometheus.items() if "ray_tinyllm_running" in query)
    assert running["metric"] == {"candidate": FIRST}
    fates = next(answer for query, answer in seen.prometheus.items() if "ray_tinyllm_trials" in query)
    assert {one["metric"]["fate"] for one in fates} == set(Fate)


def test_the_grafana_dashboard_asks_for_what_is_exported_and_for_all_of_it() -> None:
    exported = {**STUDY_GAUGES, **GPU_GAUGES}
    assert set().union(*map(_names, _queries())) == set(exported)
    for query in _queries():
        tags = {"NodeAddress"}.union(*(exported[name][1] for name in _names(query)))
        labels = re.findall(r"[{,]\s*(\w+)=", query)
        labels += [word for listed in re.findall(r"by \((.*?)\)", query) for word in listed.split(", ")]
        assert set(labels) <= tags, query


def test_a_logger_hears_what_the_record_says_under_the_records_names(seen: Seen) -> None:
    assert [record.fate for record in seen.records] == [Fate.COMPLETE] * len(seen.records)
    assert len(seen.records) >= 2
    assert [name for name, _ in seen.notes.starts] == seen.notes.ends
    assert seen.notes.starts[0] == (FIRST, seen.records[0].execution)
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for result in seen.notes.results:
        by_trial.setdefault(result["trial_id"], []).append(result)
    for record, (*windows, last) in zip(seen.records, by_trial.values(), strict=True):
        assert [one["window"]["targets_per_second"] for one in windows] == [
            window.targets_per_second for window in record.windows
        ]
        assert [one["training_iteration"] for one in windows] == [1, 2]
        told = {name: value for name, value in table_row(record).items() if name not in record.execution}
        assert {name: last.get(name) for name in told} == told


def test_a_logger_that_raises_is_said_once_and_costs_the_others_nothing(seen: Seen) -> None:
    said = "callback Broken: ConnectionError: no route to the server in on_trial_result; it is left out from here on"
    assert seen.said.splitlines() == [said]


def test_tensorboard_shows_a_run_a_candidate(seen: Seen) -> None:
    for record in seen.records:
        events = EventAccumulator(str(seen.out / "callbacks" / record.candidate)).Reload()
        (throughput,) = events.Scalars("ray/tune/targets_per_second")
        assert throughput.value == pytest.approx(record.targets_per_second)
        rates = [event.value for event in events.Scalars("ray/tune/window/targets_per_second")]
        assert rates == pytest.approx([window.targets_per_second for window in record.windows])
