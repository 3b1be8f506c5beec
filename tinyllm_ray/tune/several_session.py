"""Studies that share one budget as their people see them: how all stand, kept up to date, and one end."""

import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.tune.budget import sessions_so_far
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.decisions import DECISIONS
from tinyllm_ray.tune.processes import STUDY_VARIABLE
from tinyllm_ray.tune.report import shortest_path
from tinyllm_ray.tune.request import StudyRequest
from tinyllm_ray.tune.session import Closing
from tinyllm_ray.tune.several_folder import Standing, study_figures, write_whole
from tinyllm_ray.tune.supervisor import process_age_seconds


class PartChannel(Channel):
    """One study's end of the line that all share: its last word is not that of all."""

    def __init__(self, line: Channel, heard: Callable[[TrialRecord], None]) -> None:
        self.request = line.request
        self._line = line
        self._heard = heard

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "done":
            return
        self._line.send(kind, **fields)
        if kind == "record":
            self._heard(TrialRecord.model_validate(fields["record"]))


class SeveralSession:
    """All studies as one. `close` counts once, from whatever thread it comes."""

    def __init__(
        self, request: StudyRequest, line: Channel, standings: Sequence[Standing], say: Callable[[str], None]
    ) -> None:
        self.out = Path(request.out).resolve()
        self.standings = standings
        self.running: tuple[Standing, Callable[[], Closing | None]] | None = None
        """The study that runs, and its session as soon as there is one."""
        self._request = request
        self._line = line
        self._say = say
        self._ended: str | None = None
        self._status: int | None = None
        self._lock = threading.Lock()

        self._earlier: list[dict[str, Any]] = []

    def count_earlier(self) -> None:
        """Take the seconds of sessions before this one into account, whose helpers are done. Raises ConfigError."""
        if self._request.resume:
            self._earlier = sessions_so_far(self.out)

    def write(self) -> None:
        """Bring the summary up to date; a folder that cannot be written costs the summary alone."""
        seconds = self._request.age_seconds + process_age_seconds()
        own = {"session": os.environ.get(STUDY_VARIABLE), "began": time.time() - seconds, "seconds": seconds}
        sessions = [*self._earlier, {**own, "ended": self._ended is not None}]
        with suppress(OSError):
            write_whole(self.out, self.standings, self._request.total_seconds, sessions, self._ended)

    def write_page(self) -> None:
        """The summary, and the page that is made of it."""
        from tinyllm_ray.tune.page.index import write_index

        self.write()
        with suppress(OSError):
            write_index(self.out)

    def close(self, ended: str | None, *, interrupted: bool = False) -> int:
        """End what runs, write how all stand, say what came of each, and tell the exit status."""
        if interrupted and self.running is not None:
            standing, session = self.running
            if (current := session()) is not None:
                current.close(ended, interrupted=True)  # takes locks of its own, which others hold while they write
            standing.state, standing.reason = "interrupted", ended
        with self._lock:
            if self._status is None:
                self._ended = ended
                self.write_page()
                found = [study_figures(self.out / one.name) for one in self.standings]
                for line in self._lines(found):
                    self._say(line)
                self._status = EXIT_DONE if any(one["selected"] for one in found) else EXIT_NO_RESULT
                # As for one study: from here on nothing counts but the end.
                self._line.send("done", exit_status=self._status)
            return self._status

    def _lines(self, found: Sequence[dict[str, Any]]) -> list[str]:
        lines = [f"ended: {self._ended}"] if self._ended else []
        lines += [_line(standing, figures) for standing, figures in zip(self.standings, found, strict=True)]
        asked = zip(self._request.presets, self.standings, found, strict=True)
        answered = [(preset, standing.name) for preset, standing, figures in asked if figures["selected"]]
        if answered and (self.out / DECISIONS).exists():
            preset, name = answered[0]
            decisions, run = (shortest_path(self.out / one) for one in (DECISIONS, Path(name) / "run"))
            words = ["python", "-m", "tinyllm_ray.train", "--config", preset, "--decisions", str(decisions)]
            lines.append(f"next: {shlex.join([*words, '--out', str(run)])}")
        return lines


def _line(standing: Standing, found: dict[str, Any]) -> str:
    answer = "no answer"
    if found["selected"]:
        answer = f"{found['selected']}, {found['targets_per_second']:,.0f} targets/s"
        if found["baseline_selected"]:
            answer += ", the baseline itself"
        elif found["speedup"]:
            verified = "" if found["speedup"]["verified"] else ", not verified"
            answer += f", {found['speedup']['ratio']:.3f}x its baseline{verified}"
    why = f" ({standing.state}: {standing.reason})" if standing.state != "done" and standing.reason else ""
    return f"{standing.name}: {answer}{why}"
