"""Ray Tune's callbacks beside a study: each in a thread of its own, so that none can end the study or hold it up.

A callback hears of every window (`window`: its fields) and of every record (the columns of `tinyllm_ray.table`), after
the study has judged it; `training_iteration` counts windows. The trials that it sees have people's names, the
execution's settings for their config, and each a folder in the study's for its files.
"""

import base64
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune import Callback
from ray.tune.callback import CallbackList

from tinyllm_ray.cluster.tensorboard import TensorBoardLogger
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.table import table_row

_EVERY_STEP = frozenset({"on_step_begin", "on_step_end"})
"""Of Tune's loop, some ten a second: passed on only to callbacks that do something with them."""

FINISH_SECONDS = 20.0
"""For what callbacks do at the end, uploads for one; less where the budget has less."""

DEFAULT: Sequence[type[Callback]] = (TensorBoardLogger,)

Say = Callable[[str], None]


def pack_callbacks(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Callbacks in a form that crosses to the study's process. Raises ConfigError naming the one that cannot."""
    if not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks: {callbacks!r} is no list; give one, like [TBXLoggerCallback()]")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks: {callback!r} is no ray.tune.Callback; give an object of such a class")
        try:
            cloudpickle.dumps(callback)
        except Exception as error:  # whatever its parts raise
            raise ConfigError(
                f"callbacks: {type(callback).__name__} cannot be pickled for the study's process ({_line(error)}); "
                "open files, connections and locks in its setup()"
            ) from None
    return {"path": sys.path, "pickle": base64.b64encode(cloudpickle.dumps(list(callbacks))).decode()}


def unpack_callbacks(packed: Mapping[str, Any]) -> list[Callback]:
    """The callbacks of `pack_callbacks`; their modules are found where the sender found them. Raises ConfigError."""
    sys.path.extend(folder for folder in packed["path"] if folder not in sys.path)
    try:
        return list(cloudpickle.loads(base64.b64decode(packed["pickle"])))
    except Exception as error:  # whatever their modules raise
        raise ConfigError(f"callbacks: they do not load in the study's process ({_line(error)})") from None


@contextmanager
def guarded(
    callbacks: Sequence[Callback | type[Callback]],
    folder: Path,
    recorded: Callable[[str], TrialRecord | None],
    say: Say,
    seconds_left: Callable[[], float],
) -> Iterator[list[Callback]]:
    """Callbacks, or classes of them, for `run_trials`.

    `folder` gets a folder a candidate for their files; `recorded` gives a candidate's record once there is one, and
    `say` a line to people. On leaving they have FINISH_SECONDS to finish, or what `seconds_left` says if that is less.
    """
    guards = [_Guarded(callback, folder, recorded, say) for callback in callbacks]
    try:
        yield list(guards)
    finally:
        end = time.monotonic() + min(FINISH_SECONDS, max(0.0, seconds_left()))
        for guard in guards:
            guard.finish(max(0.0, end - time.monotonic()))


class ShownTrial:
    """A Tune trial as callbacks see it; what is not here is the trial's own."""

    def __init__(self, trial: Any, folder: Path) -> None:
        self._trial = trial
        request = trial.config["request"]
        self.config: dict[str, Any] = dict(request["config"]["execution"])
        self.evaluated_params = self.config
        self._folder = folder / request["candidate"]

    @property
    def local_path(self) -> str:
        """The folder for this trial's files, which is there once it is asked for.

        Raises FileNotFoundError while the study's own folder is away, as a shared one may be: another must not stand
        in its place when it comes back.
        """
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        return str(self._folder)

    def init_local_path(self) -> None:
        """Nothing is left to do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_trial":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._trial, name)

    def __str__(self) -> str:
        return str(self._trial)


class _Guarded(Callback):  # type: ignore[misc]
    """Hands what Tune says to one callback, in that callback's thread; one that raises is said once and left out."""

    def __init__(
        self,
        callback: Callback | type[Callback],
        folder: Path,
        recorded: Callable[[str], TrialRecord | None],
        say: Say,
    ) -> None:
        self._callback = callback
        kind = callback if isinstance(callback, type) else type(callback)
        self._name = kind.__name__
        self._hooks = {hook for hook in _HOOKS if hook not in _EVERY_STEP or hook in _overridden(kind)}
        self._folder, self._recorded, self._say = folder, recorded, say
        self._shown: dict[str, ShownTrial] = {}
        self._last: dict[str, dict[str, Any]] = {}
        """Results of trials that have ended and are not complete: the study has not judged them yet."""
        self._heard: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"callback {self._name}", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Wait for what the callback has still to do."""
        self._heard.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"callback {self._name}: not finished within {seconds:.0f} s; what it has not written is lost")

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its experiment, to restore what is never restored."""
        return {}

    def hear(self, hook: str, info: dict[str, Any]) -> None:
        """Pass on one of Tune's calls, in the study's words."""
        if hook not in self._hooks:
            return
        if "trials" in info:
            info["trials"] = [self._show(trial) for trial in info["trials"]]
        if "trial" in info:
            trial = info["trial"] = self._show(info["trial"])
            if hook == "on_trial_result":
                told = self._told(trial, info["result"])
                if told is None:
                    return
                info["result"] = told
            elif hook == "on_trial_complete" and trial.trial_id in self._last:
                self._heard.put(("on_trial_result", {**info, "result": self._judged(trial)}))
        self._heard.put((hook, info))

    def _show(self, trial: Any) -> ShownTrial:
        if trial.trial_id not in self._shown:
            self._shown[trial.trial_id] = ShownTrial(trial, self._folder)
        return self._shown[trial.trial_id]

    def _told(self, trial: ShownTrial, result: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of an event; None where there is nothing to tell, or not yet."""
        event = json.loads(result["event"])
        rest = {name: value for name, value in result.items() if name not in {"event", "config"}}
        if event["event"] == "record":
            # Tune calls its callbacks before it tells its searcher that the trial is over.
            self._last[trial.trial_id] = {**rest, "record": event["record"]}
        if event["event"] != "window":
            return None
        return {**rest, "training_iteration": event["window"]["index"] + 1, "window": _known(event["window"])}

    def _judged(self, trial: ShownTrial) -> dict[str, Any]:
        last = self._last.pop(trial.trial_id)
        raw = TrialRecord.model_validate(last.pop("record"))
        record = self._recorded(raw.candidate) or raw
        columns = {name: value for name, value in table_row(record).items() if name not in record.execution}
        return {**last, **_known(columns), "training_iteration": max(1, len(record.windows)), "done": True}

    def _work(self) -> None:
        callback: CallbackList | None = None
        left_out = False
        while (heard := self._heard.get()) is not None:
            if left_out:
                continue
            hook, info = heard
            try:
                if callback is None:
                    made = self._callback() if isinstance(self._callback, type) else self._callback
                    callback = CallbackList([made])  # which knows the signatures of older callbacks
                getattr(callback, hook)(**info)
            except Exception as error:  # somebody else's code
                left_out = True
                self._say(f"callback {self._name}: {_line(error)} in {hook}; it is left out from here on")


_HOOKS = ("setup", *(name for name in vars(Callback) if name.startswith("on_")))


def _overridden(kind: type[Callback]) -> set[str]:
    return {hook for hook in _HOOKS if getattr(kind, hook) is not getattr(Callback, hook)}


def _hook(name: str) -> Callable[..., None]:
    def call(self: _Guarded, **info: Any) -> None:
        self.hear(name, info)

    return call


for _name in _HOOKS:
    setattr(_Guarded, _name, _hook(_name))


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not known, in nested values too: loggers take None for a number."""
    return {
        name: _known(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def _line(error: BaseException) -> str:
    words = str(error).strip()
    return f"{type(error).__name__}: {words.splitlines()[0]}" if words else type(error).__name__
