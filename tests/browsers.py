"""The browser that pages are looked at with."""

import shutil

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Its program, under whatever name it is installed; None where it is not."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)
