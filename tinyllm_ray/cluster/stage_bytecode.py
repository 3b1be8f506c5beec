"""A module's bytecode for a pack, as where an installer leaves that to the first import (uv does).

A node's copies are new with every job, so that otherwise every job would compile what it imports, on every node: for
PyTorch and its compiler 6 s of a core (2.13). Standard library only.
"""

import contextlib
import os
import py_compile
import tempfile
import warnings
from pathlib import Path


def compiled(path: Path) -> bytes | None:
    """A module's bytecode, valid for a copy with its size and time of change; None for what is no Python."""
    descriptor, made = tempfile.mkstemp(suffix=".pyc")
    os.close(descriptor)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            py_compile.compile(str(path), cfile=made, doraise=True)
        return Path(made).read_bytes()
    except (py_compile.PyCompileError, ValueError, RecursionError, MemoryError):  # templates, other versions' Python
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(made)
