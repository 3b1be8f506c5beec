"""Where this machine keeps what was compiled: by torch.compile and Triton, and by Python where torch came without it.

Local to the node. Standard library alone, so that a start can ask before anything else is imported.
"""

import importlib.util
import os
import sys
import tempfile

from tinyllm_ray.errors import ConfigError

FOLDER_VARIABLE = "TINYLLM_RAY_COMPILE_CACHE"


def compile_cache_folder() -> str:
    """The folder for this user and this machine's fingerprint, made if need be.

    Raises ConfigError where it cannot be made or belongs to somebody else: what lies in it is loaded as code.
    """
    from tinyllm_ray.measure.environment import machine_fingerprint

    return _make(os.path.join(_root(), machine_fingerprint()))


def cache_variables(folder: str) -> dict[str, str]:
    """Environment variables that have a process keep its compilations in `folder`, from its start on.

    PyTorch and Triton read theirs at the first compilation and FlashAttention 4 when it is imported, so a process may
    still set them after importing torch.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.path.join(folder, "flash4"),
    } | bytecode_variables()


def given_folder() -> str | None:
    """The folder that `cache_variables` gave this process; None where nobody gave it one."""
    folder, name = os.path.split(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    return folder if name == "inductor" else None


def bytecode_variables() -> dict[str, str]:
    """Environment variables that have Python keep its bytecode beside the machines' folders; empty where torch has it.

    Container images often leave bytecode out (PYTHONDONTWRITEBYTECODE, `pip install --no-compile`): each process then
    compiles some three thousand modules anew. On an H200's host torch and its compiler took 12.6 s to import, with
    bytecode 4.5 s. A prefix that the user has set is left alone. Raises ConfigError as `compile_cache_folder`.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or os.environ.get("PYTHONPYCACHEPREFIX"):
        return {}
    folder, name = os.path.split(torch.origin)
    beside = os.path.join(folder, "__pycache__", f"{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc")
    if os.path.exists(beside):
        return {}
    return {"PYTHONPYCACHEPREFIX": _make(os.path.join(_root(), "bytecode")), "PYTHONDONTWRITEBYTECODE": ""}


def keep_bytecode() -> None:
    """Apply `bytecode_variables` to this process and those it will start; only later imports profit."""
    variables = bytecode_variables()
    os.environ.update(variables)
    if variables:
        sys.pycache_prefix, sys.dont_write_bytecode = variables["PYTHONPYCACHEPREFIX"], False


def _root() -> str:
    root = os.environ.get(FOLDER_VARIABLE) or os.path.join(tempfile.gettempdir(), f"tinyllm_ray-compile-{os.getuid()}")
    _make(root)
    if os.stat(root).st_uid != os.getuid():
        raise ConfigError(f"{root} belongs to another user; set {FOLDER_VARIABLE} to a local folder of yours")
    return root


def _make(folder: str) -> str:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set {FOLDER_VARIABLE} to a local folder of yours") from None
    return folder
