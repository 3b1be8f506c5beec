"""Whether an optional module is installed, without importing it or what it lies in."""

import importlib.util
from pathlib import Path

from tinyllm_ray.errors import ConfigError


def is_installed(module: str) -> bool:
    """By its file: importing the packages around it may take seconds, and fail for reasons of their own."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not rest:
        return spec is not None
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, *rest).with_suffix(".py").exists() for folder in folders)


def require(package: str, what: str) -> None:
    """Raises ConfigError where `package`, which `what` takes, is not installed, as in an environment made by hand."""
    if not is_installed(package):
        raise ConfigError(f"{what} takes the package {package}, which is not installed: pip install {package}")
