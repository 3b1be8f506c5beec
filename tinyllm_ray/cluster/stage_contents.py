"""What a job's processes will read, as packs: packages, tokens in use, compiled code."""

import argparse
import os
import platform
import site
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import cache_from_source
from pathlib import Path

from tinyllm_ray.cluster.stage_files import Entry, entries
from tinyllm_ray.cluster.stage_pack import key_of, make_pack, newest
from tinyllm_ray.cluster.stage_place import COMPILED, ENVIRONMENT, TOKENS
from tinyllm_ray.figures import told_apart

MOST_BYTES = 8 * 2**30
"""Of tokens, and of compiled code: what is larger is read where it lies (C4's 46 GB, of which a study reads little)."""


@dataclass
class Packs:
    """Folders of packs by what they hold, and what was left out, in words."""

    folders: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def make_packs(packs: Path, command: Sequence[str], with_environment: bool = True) -> Packs:
    """Packs of everything that `command` (`tune --budget 45m ...`) needs; what cannot be packed is noted."""
    made = Packs()
    steps: dict[str, Callable[[], Path | str]] = {
        TOKENS: lambda: pack_tokens(packs, command),
        COMPILED: lambda: pack_compiled(packs),
    }
    if with_environment:
        steps = {ENVIRONMENT: lambda: pack_environment(packs)} | steps
    for name, step in steps.items():
        try:
            found = step()
        except Exception as error:  # a start without that part is a slower one, and no reason not to start
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, Path):
            made.folders[name] = found
        elif found:
            made.notes.append(f"{name}: {found}")
    return made


def pack_environment(packs: Path) -> Path | str:
    """All packages that this interpreter finds in its folders for them, the first of a name."""
    files: dict[str, Entry] = {}
    for folder in reversed(package_folders()):
        files |= {entry.name: entry for entry in entries(folder)}
    if not files:
        return "this Python has no packages of its own"
    ordered = [files[name] for name in sorted(files)]
    key = key_of(ordered, platform.python_version(), sys.base_prefix)
    return make_pack(packs, ENVIRONMENT, key, with_bytecode(ordered), python=platform.python_version())


def with_bytecode(files: Sequence[Entry]) -> list[Entry]:
    """The files, and an entry to compile for every module of this interpreter's whose bytecode is not among them."""
    known = {entry.name for entry in files}
    modules = (entry for entry in files if entry.name.endswith(".py") and not entry.is_link)
    lacking = [replace(entry, name=cache_from_source(entry.name), to_compile=True) for entry in modules]
    return sorted([*files, *(entry for entry in lacking if entry.name not in known)], key=lambda entry: entry.name)


def package_folders() -> list[Path]:
    """Folders of packages in use (site-packages and its like), the first to be searched first."""
    known = {os.path.realpath(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}
    found = [path for path in sys.path if os.path.realpath(path) in known and os.path.isdir(path)]
    return [Path(path) for path in dict.fromkeys(found)]


def pack_tokens(packs: Path, command: Sequence[str]) -> Path | str:
    """The token cache that the command reads, the default one built if need be."""
    folder = tokens_of(command)
    if folder is None:
        return ""
    from tinyllm_ray.data.cache import open_cache

    cache = open_cache(folder)
    files = entries(folder, cache.identity)
    size = sum(entry.size for entry in files)
    if size > MOST_BYTES:
        return f"{_too_large(folder, size)}; it is read where it lies"
    return make_pack(packs, TOKENS, key_of(files), files, identity=cache.identity)


def tokens_of(command: Sequence[str]) -> Path | None:
    """Folder of the token cache that `tune ...` or `train ...` will open; None for other commands."""
    if not command or command[0] not in ("tune", "train"):
        return None
    from tinyllm_ray.config import load
    from tinyllm_ray.data.prepare import default_cache

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    options, _ = parser.parse_known_args(list(command[1:]))
    recipe = options.config or options.preset
    chosen = load(recipe, options.set).data.cache if recipe else None
    return Path(chosen).expanduser() if chosen else default_cache(progress=False)


def pack_compiled(packs: Path) -> Path | str:
    """What earlier jobs have collected, else what this node has kept of earlier runs."""
    collected = newest(packs, COMPILED)
    return collected or collect_compiled(packs, _kept())


def collect_compiled(packs: Path, root: Path) -> Path | str:
    """A pack of the compile caches of all kinds of machines below `root`."""
    if not root.is_dir():
        return ""
    files = entries(root, leave_out=lambda name: name == "bytecode" or name.endswith(".lock"))
    size = sum(entry.size for entry in files)
    if not files or size > MOST_BYTES:
        return _too_large(root, size) if files else ""
    return make_pack(packs, COMPILED, key_of(files), files, root=str(root))


def _too_large(folder: Path, size: int) -> str:
    has, most = told_apart(".0f", size / 2**30, MOST_BYTES / 2**30)
    return f"{folder} has {has} GiB, over {most}"


def _kept() -> Path:
    from tinyllm_ray.train.compile_cache import compile_cache_folder

    return Path(compile_cache_folder()).parent
