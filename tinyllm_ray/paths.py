"""Paths as people give them: one that no file system can take is said in one line, not where it is first used.

Standard library only: the supervisor imports this module.
"""

from pathlib import Path

from tinyllm_ray.errors import ConfigError

_SHOWN_CHARACTERS = 60
_LONGEST_NAME = 255
_LONGEST_PATH = 4095
"""Linux's NAME_MAX and PATH_MAX without the byte that ends it; macOS has the same or less."""


def is_there(path: Path, what: str) -> bool:
    """Whether there is a file or folder. Raises ConfigError, naming `what` was given, where it cannot be asked for."""
    try:
        path.lstat()
        return path.exists()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {shown(path)}: {reason(error)}; choose another") from None


def unusable(value: Path | str) -> str | None:
    """Why no file system takes this path, or no program this text; None where that depends on the file system.

    A text may be something else than a path, and as long as it likes.
    """
    if "\0" in str(value):
        return "it holds a null byte; write it without"
    names = value.parts if isinstance(value, Path) else ()
    if any(len(name.encode(errors="surrogateescape")) > _LONGEST_NAME for name in names):
        return f"a file's name has {_LONGEST_NAME} bytes at most; choose a shorter one"
    if len(str(value).encode(errors="surrogateescape")) > _LONGEST_PATH and names:
        return f"a path has {_LONGEST_PATH} bytes at most; choose a shorter one"
    return None


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be used, for people."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def shown(path: Path | str) -> str:
    """A path for a message, cut where it is longer than a line is for."""
    text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(path))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
