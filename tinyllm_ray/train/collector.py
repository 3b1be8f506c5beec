"""Python's garbage collector during a start; standard library alone, since it begins before anything is imported."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """While entered nothing is collected; afterwards what is alive by then is not looked at again (`gc.freeze`).

    Imports make hundreds of thousands of objects that stay, and the collector walks them over and over: importing
    torch and its compiler took 2.4 s of CPU time instead of 3.1, and tracing the first update afterwards 3.2 instead
    of 3.7 (two x86 cores, 20m, torch 2.13). It is for imports, not for the compilation, which makes garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # what is frozen is not taken down, and Triton's bindings complain of that at exit
        if was_enabled:
            gc.enable()
