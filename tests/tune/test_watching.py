"""A study while it runs: its figures on Ray's metrics endpoint and in Prometheus, its trials' names, its callbacks.

One study of the tiny model measures its baseline and then a candidate without end, which is killed once all has been
looked at.
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
import sys
import tempfile
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
from ray.tune.logger import JsonLoggerCallback, LoggerCallback
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watch_files import CLUSTER, metric_names, queries

from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.callbacks import DEFAULT
from tinyllm_ray.cluster.connect import Connection, connect
from tinyllm_ray.cluster.metrics import STUDY_GAUGES
from tinyllm_ray.cluster.trials import run_trials
from tinyllm_ray.config import Config
from tinyllm_ray.data.prepare import CACHE_VARIABLE
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.space import load_space, parse_space
from tinyllm_ray.search.study import Study
from tinyllm_ray.table import table_row
from tinyllm_ray.tune import Tuner
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.watching import watched
from tinyllm_ray.yamlfile import parse_yaml

SIZE = "0.5M"
FIRST, SECOND = f"{SIZE} mb8 eager auto t1", f"{SIZE} mb8 eager math t1"


SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {sdpa_backend: [auto, math]}
protocol: {data_mode: synthetic, warmup_updates: 1, windows: 2, updates_per_window: 2}
search_windows: by_count
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
    """Its second candidate runs until somebody ends its process, `pid`."""

    pid = 0
    _asked = 0

    def ask(self) -> Mapping[str, Any] | None:
        request = super().ask()
        self._asked += request is not None
        if request is None:
            return None
        endless = {"updates_per_window": 10**9} if self._asked == 2 else {}
        return {**request, "protocol": {**request["protocol"], **endless}, "limit_seconds": 1e6}

    def hear(self, candidate: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "forked" and self._asked == 2:
            self.pid = event["pid"]
        super().hear(candidate, event)


@dataclass
class Seen:
    """What was seen of the study while its second candidate ran, and what it left."""

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
        callbacks = [Broken(), notes, *DEFAULT]

        def run() -> None:
            with watched(driver, report, callbacks, console) as guards:
                run_trials(driver, connection, out / "candidates", out / "tune", None, guards)

        study = pool.submit(run)
        _until(lambda: driver.pid or study.done())
        assert driver.pid, study.result()
        try:
            metrics, titles = _metrics_of_a_study(), _titles_of_workers(connection)
            prometheus = _ask_prometheus(out) if shutil.which("prometheus") else None
        finally:
            os.kill(driver.pid, signal.SIGKILL)
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
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def look() -> str | None:
        text = ""
        with contextlib.suppress(OSError), urllib.request.urlopen(address) as page:
            text = page.read().decode()
        there = all(f"ray_{name}{{" in text for name in STUDY_GAUGES)
        return text if there and _samples(text, "tinyllm_running", candidate=SECOND) else None

    return str(_until(look))


def _titles_of_workers(connection: Connection) -> set[str]:
    """As the dashboard's page of the node lists them; asked until one of them is a candidate's."""
    (node,) = ray.nodes()
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "get-auth-token"]
    token = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    request = urllib.request.Request(
        f"{connection.dashboard}/nodes/{node['NodeID']}", headers={"Authorization": f"Bearer {token}"}
    )

    def look() -> set[str] | None:
        workers: list[dict[str, Any]] = []
        # The dashboard answers with an error, or without the workers, until the node has reported to it.
        with contextlib.suppress(OSError, LookupError), urllib.request.urlopen(request) as page:
            workers = json.load(page)["data"]["detail"]["workers"]
        titles = {" ".join(worker["cmdline"]).strip() for worker in workers}
        return titles if any(SECOND in title for title in titles) else None

    found: set[str] = _until(look)
    return found


def _ask_prometheus(folder: Path) -> dict[str, list[Any]]:
    """Answers to the dashboard's queries from Prometheus with the shipped settings.

    Those of a study are asked until they have one; those of GPUs may have none here, but have to be queries.
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

        (running,) = (query for query in queries("the study") if "tinyllm_running" in query)
        # The first candidate is said to run until Ray has heard that it does not.
        _until(lambda: [one["metric"] for one in look(running)] == [{"candidate": SECOND}])
        return {
            query: _until(functools.partial(look, query)) if metric_names(query) <= set(STUDY_GAUGES) else look(query)
            for query in queries("the study")
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


def _samples(metrics: str, name: str, **labels: str) -> list[float]:
    """Values of a metric's samples that have these labels."""
    lines = re.findall(rf"^ray_{name}\{{(.*)\}} (\S+)$", metrics, flags=re.MULTILINE)
    return [float(value) for tags, value in lines if all(f'{key}="{text}"' in tags for key, text in labels.items())]


@pytest.mark.slow
def test_the_endpoint_tells_the_budget_the_running_candidate_and_the_trials(seen: Seen) -> None:
    baseline = seen.records[0].targets_per_second

    def value(name: str, **labels: str) -> float:
        (found,) = _samples(seen.metrics, name, study="the study", **labels)
        return found

    assert 0 < value("tinyllm_budget_left_seconds") < 1000
    assert value("tinyllm_budget_seconds") == 1200
    assert value("tinyllm_running", candidate=SECOND) == 1
    assert (value("tinyllm_trials", fate="complete"), value("tinyllm_trials", fate="failed")) == (1, 0)
    assert value("tinyllm_best_targets_per_second") == pytest.approx(baseline)
    assert value("tinyllm_baseline_targets_per_second") == pytest.approx(baseline)
    assert value("tinyllm_candidate_targets_per_second", candidate=FIRST) == pytest.approx(baseline)


@pytest.mark.slow
def test_the_dashboard_names_a_trials_process_for_people(seen: Seen) -> None:
    assert f"ray::{SECOND}" in seen.titles


@pytest.mark.slow
def test_prometheus_reads_it_with_the_shipped_settings(seen: Seen) -> None:
    if seen.prometheus is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    (running,) = next(answer for query, answer in seen.prometheus.items() if "ray_tinyllm_running" in query)
    assert running["metric"] == {"candidate": SECOND}
    fates = next(answer for query, answer in seen.prometheus.items() if "ray_tinyllm_trials" in query)
    assert {one["metric"]["fate"] for one in fates} == set(Fate)


@pytest.mark.slow
def test_a_logger_hears_what_the_record_says_under_the_recordsmetric_names(seen: Seen) -> None:
    assert [record.fate for record in seen.records] == [Fate.COMPLETE, Fate.FAILED]
    assert [name for name, _ in seen.notes.starts] == seen.notes.ends
    assert seen.notes.starts[0] == (FIRST, seen.records[0].execution)
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for result in seen.notes.results:
        by_trial.setdefault(result["trial_id"], []).append(result)
    for record, (*windows, last) in zip(seen.records, by_trial.values(), strict=True):
        assert [one["window"]["targets_per_second"] for one in windows] == [
            window.targets_per_second for window in record.windows
        ]
        assert [one["training_iteration"] for one in windows] == [1, 2][: len(record.windows)]
        told = {name: value for name, value in table_row(record).items() if name not in record.execution}
        assert {name: last.get(name) for name in told} == told


@pytest.mark.slow
def test_a_logger_that_raises_is_said_once_and_costs_the_others_nothing(seen: Seen) -> None:
    said = "callback Broken: ConnectionError: no route to the server in on_trial_result; it is left out from here on"
    assert seen.said.splitlines() == [said]


@pytest.mark.slow
def test_tensorboard_shows_a_run_a_candidate(seen: Seen) -> None:
    record = seen.records[0]
    events = EventAccumulator(str(seen.out / "callbacks" / record.candidate)).Reload()
    (throughput,) = events.Scalars("ray/tune/targets_per_second")
    assert throughput.value == pytest.approx(record.targets_per_second)
    rates = [event.value for event in events.Scalars("ray/tune/window/targets_per_second")]
    assert rates == pytest.approx([window.targets_per_second for window in record.windows])


@pytest.mark.slow
def test_a_tuner_takes_callbacks_and_its_study_tells_them(
    built_root: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(built_root))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one = load_space(tiny / "space.yaml").model_copy(update={"factors": {"micro_batch_size": (8,)}})
    callbacks = [Broken(), JsonLoggerCallback()]
    out = tmp_path / "study"
    result = Tuner(
        config=tiny / "recipe.yaml", space=one, budget="200s", objective="throughput", out=out, callbacks=callbacks
    ).fit()
    for record in result.records:
        *_, last = map(json.loads, (out / "callbacks" / record.candidate / "result.json").read_text().splitlines())
        assert last["targets_per_second"] == record.targets_per_second
        assert not list((out / "callbacks").rglob("*tfevents*")), "what is given takes the place of the default"


def test_a_mistake_in_the_callbacks_is_said_before_the_study(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks: 'tensorboard' is no ray\.tune\.Callback"):
        Tuner(budget="1m", out=tmp_path, callbacks=["tensorboard"])
