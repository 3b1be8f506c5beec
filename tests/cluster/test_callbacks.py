"""Callbacks beside a study: what they are told, what becomes of those that raise or hang, how they get there."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk
from ray.tune import Callback
from ray.tune.logger import JsonLoggerCallback, LoggerCallback, TBXLoggerCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tinyllm_ray.cluster.callbacks import DEFAULT, guarded, pack_callbacks, unpack_callbacks
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord

EXECUTION = {"micro_batch_size": 8, "update": "eager"}
WINDOW = {"index": 0, "updates": 2, "targets_per_second": 100.0, "loss": None, "gpu": {"power_watts": 500.0}}
RECORD = TrialRecord(
    study="s",
    candidate="c01",
    kind="measurement",
    fate=Fate.COMPLETE,
    recipe_identity="r",
    execution_identity="e",
    cache_identity=None,
    source_identity="i",
    source_dirty=None,
    execution=EXECUTION,
    targets_per_second=100.0,
    timestamp=7.0,
)
JUDGED = RECORD.model_copy(update={"fate": Fate.INVALID, "reason": "its losses are not the baseline's"})


class Trial:
    """One of Tune's, as far as loggers look."""

    trial_id = "1"
    status = "RUNNING"
    local_path = "/nowhere"
    checkpoint = None

    def __init__(self) -> None:
        self.config = {"request": {"candidate": "c01", "config": {"execution": EXECUTION}}, "logs": "/nowhere"}
        self.evaluated_params = self.config

    def __str__(self) -> str:
        return "20m mb8 eager"


class Study:
    """Says to callbacks what Tune does of one trial."""

    def __init__(self, folder: Path, *callbacks: Any, seconds_left: float = 100.0) -> None:
        self.said: list[str] = []
        self.folder = folder
        self._callbacks, self._seconds_left = callbacks, seconds_left
        self._judged: dict[str, TrialRecord] = {}

    def run(self, *events: Mapping[str, Any]) -> None:
        with guarded(
            self._callbacks, self.folder, self._judged.get, self.said.append, lambda: self._seconds_left
        ) as guards:
            trial = Trial()
            place = {"iteration": 1, "trials": [trial], "trial": trial}
            self._call(guards, "setup", stop=None, num_samples=-1, total_num_samples=-1)
            self._call(guards, "on_trial_start", **place)
            for number, event in enumerate(events, 1):
                result = {"event": json.dumps(event), "training_iteration": number, "trial_id": "1", "done": False}
                self._call(guards, "on_trial_result", **place, result={**result, "config": trial.config})
            self._judged["c01"] = JUDGED  # Tune's searcher hears of it here
            self._call(guards, "on_trial_complete", **place)
            self._call(guards, "on_experiment_end", trials=[trial])

    def _call(self, guards: list[Callback], hook: str, **info: Any) -> None:
        for guard in guards:
            getattr(guard, hook)(**dict(info))


STAGE = {"event": "stage", "stage": "compile", "seconds": 1.0}
EVENTS = (STAGE, {"event": "window", "window": WINDOW}, {"event": "record", "record": RECORD.model_dump(mode="json")})


class Notes(LoggerCallback):
    """Writes down all calls, and in which thread they came."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.threads: set[str] = set()

    def setup(self, **info: Any) -> None:
        self._note("setup", None)

    def log_trial_start(self, trial: Any) -> None:
        self._note("start", (str(trial), trial.config, trial.status))

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        self._note("result", result)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        self._note("end", failed)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._note("experiment end", [str(trial) for trial in trials])

    def _note(self, what: str, of: Any) -> None:
        self.heard.append((what, of))
        self.threads.add(threading.current_thread().name)


def test_it_hears_of_windows_and_of_the_record_as_it_was_judged(tmp_path: Path) -> None:
    notes = Notes()
    Study(tmp_path, notes).run(*EVENTS)
    calls = [what for what, _ in notes.heard]
    assert calls == ["setup", "start", "result", "result", "end", "experiment end"]
    assert notes.heard[1] == ("start", ("20m mb8 eager", EXECUTION, "RUNNING"))
    window, last = notes.heard[2][1], notes.heard[3][1]
    known = {"index": 0, "updates": 2, "targets_per_second": 100.0, "gpu": {"power_watts": 500.0}}
    assert window == {"training_iteration": 1, "trial_id": "1", "done": False, "window": known}
    assert (last["fate"], last["reason"]) == ("invalid", JUDGED.reason)
    assert (last["targets_per_second"], last["timestamp"], last["done"]) == (100.0, 7.0, True)
    assert None not in last.values()
    assert notes.threads == {"callback Notes"}


def test_a_lost_trial_ends_without_a_result(tmp_path: Path) -> None:
    notes = Notes()
    Study(tmp_path, notes).run(STAGE)
    assert [what for what, _ in notes.heard] == ["setup", "start", "end", "experiment end"]


def test_files_go_to_the_studys_folder(tmp_path: Path) -> None:
    study = Study(tmp_path / "callbacks", TBXLoggerCallback, JsonLoggerCallback())
    study.run(*EVENTS)
    assert study.said == []
    names = {path.name.split(".tfevents")[0] for path in (tmp_path / "callbacks" / "c01").iterdir()}
    assert names == {"events.out", "params.json", "params.pkl", "result.json"}
    lines = (tmp_path / "callbacks" / "c01" / "result.json").read_text().splitlines()
    assert json.loads(lines[-1])["targets_per_second"] == 100.0
    assert json.loads((tmp_path / "callbacks" / "c01" / "params.json").read_text()) == EXECUTION


def shown(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], Any]:
    """What TensorBoard shows of a candidate: tag -> (step, value), and its table of settings."""
    reader = EventAccumulator(str(folder / "c01")).Reload()
    scalars = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    return scalars, reader.PluginTagToContent("hparams")


def test_the_default_shows_what_tunes_own_logger_shows(tmp_path: Path) -> None:
    study = Study(tmp_path / "own", *DEFAULT)
    study.run(*EVENTS)
    Study(tmp_path / "tunes", TBXLoggerCallback).run(*EVENTS)
    scalars, settings = shown(tmp_path / "own")
    assert study.said == []
    assert scalars["ray/tune/window/targets_per_second"] == [(1, 100.0)]
    assert scalars["ray/tune/targets_per_second"] == [(1, 100.0)]
    assert settings
    assert (scalars, settings) == shown(tmp_path / "tunes")


def test_a_full_disk_costs_the_default_a_line_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(str(args.exc_value)))
    study = Study(tmp_path, *DEFAULT)
    with full_disk():
        study.run(*[EVENTS[1]] * 20, EVENTS[2])
    (line,) = study.said
    assert line.startswith("callback TensorBoardLogger: OSError: no more TensorBoard events: ")
    assert line.endswith("File too large in on_trial_result; it is left out from here on")
    assert died == []


def test_while_the_studys_folder_is_away_none_is_made_in_its_place(tmp_path: Path) -> None:
    study = Study(tmp_path / "study" / "callbacks", TBXLoggerCallback)
    study.run(*EVENTS)
    (line,) = study.said
    assert "TBXLoggerCallback: FileNotFoundError" in line
    assert list(tmp_path.iterdir()) == []


class Broken(LoggerCallback):
    """Raises as soon as there is something to log."""

    calls = 0

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        Broken.calls += 1
        raise ConnectionError("no route\nmore")


class NotInstalled(LoggerCallback):
    """A logger whose package is missing."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'tensorboardX'")


def test_one_that_raises_is_said_once_and_left_out(tmp_path: Path) -> None:
    notes = Notes()
    study = Study(tmp_path, Broken(), NotInstalled, notes)
    study.run(*EVENTS)
    assert sorted(study.said) == [
        "callback Broken: ConnectionError: no route in on_trial_result; it is left out from here on",
        "callback NotInstalled: ModuleNotFoundError: No module named 'tensorboardX' in setup; "
        "it is left out from here on",
    ]
    assert Broken.calls == 1
    assert len(notes.heard) == 6


def test_one_that_hangs_holds_nothing_up_and_is_said(tmp_path: Path) -> None:
    class Hanging(LoggerCallback):
        def log_trial_start(self, trial: Any) -> None:
            released.wait()

    released = threading.Event()
    study = Study(tmp_path, Hanging(), seconds_left=-3.0)
    study.run(*EVENTS)
    assert study.said == ["callback Hanging: not finished within 0 s; what it has not written is lost"]
    released.set()


def unpicklable() -> Callback:
    callback = Notes()
    callback.lock = threading.Lock()  # type: ignore[attr-defined]
    return callback


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: [unpicklable()], "callbacks: Notes cannot be pickled for the study's process"),
        (lambda: ["tensorboard"], "callbacks: 'tensorboard' is no ray.tune.Callback"),
        (lambda: [TBXLoggerCallback], "is no ray.tune.Callback; give an object"),
        (lambda: Notes(), "is no list"),
    ],
)
def test_what_cannot_cross_to_the_studys_process_is_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack_callbacks(make())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


MODULE = """
from ray.tune.logger import LoggerCallback

class Mine(LoggerCallback):
    def __init__(self, word):
        self.word = word
"""


def test_a_callbacks_module_is_found_where_the_sender_found_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text(MODULE)
    code = (
        "import json, beside_the_script, tinyllm_ray.cluster.callbacks as c; "
        "print(json.dumps(c.pack_callbacks([beside_the_script.Mine('hello')])))"
    )
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
    sent = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True).stdout
    (callback,) = unpack_callbacks(json.loads(sent))
    assert type(callback).__module__ == "beside_the_script"
    assert callback.word == "hello"
    sys.path.remove(str(tmp_path))
    del sys.modules["beside_the_script"]
    with pytest.raises(ConfigError, match=r"they do not load .* No module named 'beside_the_script'"):
        unpack_callbacks({**json.loads(sent), "path": []})
