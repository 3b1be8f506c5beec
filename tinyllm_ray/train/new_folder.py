"""A folder that appears whole or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyllm_ray.errors import ConfigError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write files into, which takes the name `out` when the block has ended well and is removed otherwise.

    Raises ConfigError where `out` holds something already or cannot be written.
    """
    target = out.resolve()
    # Beside the target: a rename is one step within a file system only.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        # The rename replaces an empty folder; what else is in the way would make it fail in many words.
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"--out {out}: the folder is not empty; choose another or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; choose a folder that can be written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
