"""Where this machine keeps what torch.compile and Triton made: local to the node, one folder a machine fingerprint."""

import os
import tempfile

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import machine_fingerprint

FOLDER_VARIABLE = "TINYLLM_RAY_COMPILE_CACHE"


def compile_cache_folder() -> str:
    """The folder for this machine and this user, made if need be.

    Raises ConfigError where it cannot be made or belongs to somebody else: what lies in it is loaded as code.
    """
    root = os.environ.get(FOLDER_VARIABLE) or os.path.join(tempfile.gettempdir(), f"tinyllm_ray-compile-{os.getuid()}")
    folder = os.path.join(root, machine_fingerprint())
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if os.stat(root).st_uid != os.getuid():
            raise ConfigError(f"{root} belongs to another user; set {FOLDER_VARIABLE} to a local folder of yours")
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set {FOLDER_VARIABLE} to a local folder of yours") from None
    return folder


def cache_variables(folder: str) -> dict[str, str]:
    """Environment variables that have a process keep its compilations in `folder`, from its start on."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
    }
