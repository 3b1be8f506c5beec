"""A running study as its people see it: what is said and shown, the report kept up to date, and one end."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from rich.console import Console

from tinyllm_ray.errors import EXIT_DONE
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.live import Display, open_display, say
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.table import Row, View


class Closing(Protocol):
    """What a signal ends."""

    def close(self, ended: str | None, *, interrupted: bool = False) -> int:
        """End with the reason given; returns the exit status. Once, from whatever thread it comes."""


class Holder(Protocol):
    """Who runs a study: its line to the supervisor, and the session as soon as there is one."""

    channel: Channel
    session: Closing | None


class Session:
    """Publishes records, shows candidates, rewrites the report; `close` counts once, from whatever thread it comes."""

    def __init__(
        self,
        driver: StudyDriver,
        report: Report,
        channel: Channel,
        console: Console,
        decide: Callable[[], None] = lambda: None,
    ) -> None:
        """`decide` keeps what the study came to for others, once its report stands."""
        self._driver = driver
        self._decide = decide
        self._report = report
        self._channel = channel
        self._console = console
        self._shown = ExitStack()
        self._lock = threading.Lock()
        self._status: int | None = None
        self._report_failed = False
        config = report.config
        title = f"{config.model.parameters / 1e6:.1f}M parameters, {config.targets_per_update:,} targets an update"
        self._display: Display = self._shown.enter_context(
            open_display(console, lambda: View(title, driver.shown, driver.seconds_left))
        )
        driver.publish, driver.changed = self._publish, self._changed

    def close(self, ended: str | None, *, interrupted: bool = False) -> int:
        """Show no more, write the last report, say what the study came to, and tell the exit status."""
        with self._lock:
            if self._status is None:
                self._driver.stop(ended, interrupted=interrupted)
                self._shown.close()
                stands = self._write_report()
                for line in self._report.closing_lines(self._driver):
                    say(self._console, line)
                if not stands:
                    again = "make room and run it again, a study with --resume"
                    say(self._console, f"{self._report.out}: what is there is older than this; {again}")
                self._decide()
                self._status = self._report.exit_status(self._driver)
                # From here on nothing counts but the end: a Ray that does not shut down costs DONE_SECONDS at most.
                self._channel.send("done", exit_status=self._status)
            return self._status

    def settle(self) -> None:
        """Write the report once more, with all seconds that were used, and its page; drop what nobody needs."""
        self._write_report()
        self._report.finish()

    def _publish(self, record: TrialRecord) -> None:
        self._channel.send("record", record=record.model_dump(mode="json"))

    def _changed(self, row: Row) -> None:
        self._write_report()
        if self._report.exit_status(self._driver) == EXIT_DONE:
            self._channel.send("standing", exit_status=EXIT_DONE)
        self._display.show(row)

    def _write_report(self) -> bool:
        """Whether it stands: a folder that cannot be written costs the report, not the records, kept elsewhere."""
        try:
            self._report.write(self._driver)
            return True
        except OSError as error:
            if not self._report_failed:
                say(self._console, f"{self._report.out}: the report cannot be written: {error.strerror}")
            self._report_failed = True
            return False
