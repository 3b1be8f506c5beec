"""Paths as people give them: one that no file system can take is said in one line, not where it is first used.

Standard library only: the supervisor imports this module.
"""

from pathlib import Path

from tinyllm_ray.errors import ConfigError

_SHOWN_CHARACTERS = 60


def is_there(path: Path, what: str) -> bool:
    """Whether there is a file or folder. Raises ConfigError, naming `what` was given, where it cannot be asked for."""
    try:
        path.lstat()
        return path.exists()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {shown(path)}: {reason(error)}; choose another") from None


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be used, for people."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def shown(path: Path | str) -> str:
    """A path for a message, cut where it is longer than a line is for."""
    text = str(path).encode("unicode_escape").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
