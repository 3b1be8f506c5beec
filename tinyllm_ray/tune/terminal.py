"""Leaves a terminal as it was, where a study was killed while it drew on it.

Standard library only: the supervisor imports this module.
"""

import contextlib
import os
import select
import sys

_SHOW_CURSOR = b"\x1b[?25h"
_DUMB = ("", "dumb", "unknown")


def show_cursor() -> None:
    """A live table hides the cursor; one that was killed has not shown it again. Waits for no terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error, or none with a descriptor
        descriptor = sys.stderr.fileno()
        drawn_on = os.isatty(descriptor) and os.environ.get("TERM", "").lower() not in _DUMB
        if drawn_on and select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, _SHOW_CURSOR)
