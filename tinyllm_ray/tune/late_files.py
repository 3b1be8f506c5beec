"""Files of a study's folder that wait for its file system: one that goes away for a while costs no trial."""

from pathlib import Path

from tinyllm_ray import journal


class LateFiles:
    """Writes files at once where that works, else with the next one."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._waiting: dict[Path, bytes] = {}

    def write(self, path: Path, data: bytes) -> None:
        """Write `path`, relative to the folder, after all that waits."""
        self._waiting[path] = data
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, as far as it can be written."""
        for path, data in list(self._waiting.items()):
            try:
                journal.write_atomically(self._out / path, data)
            except OSError:
                return
            del self._waiting[path]
