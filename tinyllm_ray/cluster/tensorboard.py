"""TensorBoard's event files beside a study, a folder a candidate.

They hold what Ray Tune's own logger, TBXLoggerCallback, writes, under the same tags. That one goes through a thread of
tensorboardX's: of a full disk the thread dies with a traceback, and what is logged next waits for it for ever.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ray.tune.logger import LoggerCallback

from tinyllm_ray.train.event_files import EventFiles

_LEFT_OUT = frozenset({"config", "pid", "timestamp", "time_total_s", "training_iteration"})
"""Of a result's fields: what is no measurement."""


class TensorBoardLogger(LoggerCallback):  # type: ignore[misc]
    """Writes the numbers of every result as scalars by `training_iteration`, and at the end the settings beside them.

    Raises OSError where they cannot be written.
    """

    def __init__(self) -> None:
        self._files: dict[str, EventFiles] = {}
        self._last: dict[str, dict[str, float]] = {}

    def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
        """The numbers of one result, on the disk when this returns."""
        name = trial.trial_id
        if name not in self._files:
            self._files[name] = EventFiles(Path(trial.local_path), tell=_refuse)
        values = dict(_numbers({key: value for key, value in result.items() if key not in _LEFT_OUT}, "ray/tune"))
        self._last[name] = values
        self._files[name].add(result["training_iteration"], values)
        self._files[name].flush()

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        """The trial's settings with its last numbers, for TensorBoard's table of them."""
        from tensorboardX.summary import hparams

        files = self._files.pop(trial.trial_id, None)
        if files is None:
            return
        settings = {key: value for key, value in trial.config.items() if value is not None}
        for summary in hparams(settings, self._last.pop(trial.trial_id)):
            files.put(summary)
        files.close()


def _numbers(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}/{key}")
        elif isinstance(value, int | float) and not math.isnan(value):
            yield f"{above}/{key}", value


def _refuse(line: str) -> NoReturn:
    raise OSError(line)
