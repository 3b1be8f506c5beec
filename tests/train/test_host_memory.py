"""Freed memory is kept by the process that asked for it."""

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, sys
from pathlib import Path
from tinyllm_ray.train.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 64 * 2**20
block = libc.malloc(size)
ctypes.memset(block, 1, size)
libc.free(block)
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 > size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
@pytest.mark.parametrize(("how", "kept"), [("keep", "True"), ("default", "False")])
def test_freed_memory_stays_with_the_process(how: str, kept: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, how], text=True, stdout=subprocess.PIPE, check=True)
    assert done.stdout.strip() == kept
