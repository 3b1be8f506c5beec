"""TensorBoard event files of a run: scalars by step, on the disk within seconds, and never worth a run's life.

Records are written here and now, through tensorboardX's record writer. Its `SummaryWriter` hands them to a thread over
a queue of ten: where that thread dies of a full disk, the eleventh record waits for ever, and the training with it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinyllm_ray.clock import Clock

log = logging.getLogger(__name__)

_SECONDS_A_FLUSH = 5.0
"""What a killed run may lose; a flush is an fsync, milliseconds on a network's file system."""

_PREFIX = "events.out.tfevents."


class EventFiles:
    """Writes into `folder`, made where it is absent; every object has a file of its own, after those of earlier ones.

    `purge_step` is the first step a resumed run writes again: TensorBoard drops that step and all after it from the
    files before (its fast loader does so tag by tag, when the tag is written again).
    What goes wrong with the disk is told once, in a line, and from then on nothing is written.
    """

    def __init__(
        self,
        folder: Path,
        purge_step: int | None = None,
        clock: Clock = time.monotonic,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        # Imported here, so that a run without event files does not wait for it.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._clock, self._tell = clock, tell
        self._flushed_at = clock()
        self._writer: Any = None
        self._path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / _next_name(folder)
            self._writer = RecordWriter(str(self._path))
        except OSError as error:
            self._give_up(error)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The scalars of a step, by tag; a step may be added to several times, with other tags."""
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.put(self._summary(value=scalars), step)
        if self._clock() - self._flushed_at >= _SECONDS_A_FLUSH:
            self.flush()

    def put(self, summary: Any, step: int | None = None) -> None:
        """A summary of TensorBoard's, such as `tensorboardX.summary` makes."""
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Everything added so far is on the disk when this returns."""
        self._flushed_at = self._clock()
        if self._writer is None:
            return
        try:
            self._writer.flush()
            self._path.stat()  # a file that was removed takes writes without a word
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush and end the file; what is added afterwards is dropped."""
        self.flush()
        self._drop()

    def _write(self, event: Any) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(event.SerializeToString())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._drop()
        self._tell(f"no more TensorBoard events: {self._path}: {error.strerror or error}")

    def _drop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()


def _next_name(folder: Path) -> str:
    """TensorBoard knows a file by `tfevents` and reads a folder's in the order of their names.

    Numbers keep the order of sessions, which times do not: two within a second share one, and clocks of nodes differ.
    """
    numbers = [int(path.suffix[1:]) for path in folder.glob(f"{_PREFIX}*") if path.suffix[1:].isdecimal()]
    return f"{_PREFIX}{max(numbers, default=0) + 1:06d}"
