"""What a process compiled, as one file that starts another one warm, on a machine whose compile cache is empty.

The file is a zip archive: PyTorch's own bundle of the graphs that the process used, whether it compiled them or found
them in its cache (https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html; a GPU's Triton
kernels are part of it), and the shared libraries that it has loaded out of the cache, a CPU's kernels among them,
which the bundle leaves out: with the bundle alone `nano` compiled for 52 s instead of 72, with both for 24 (two busy
cores). The graphs are found by PyTorch's own keys or not at all; which kernels then run is for the proof to say.
"""

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tinyllm_ray import journal
from tinyllm_ray.promise import CompiledFile

GRAPHS = "graphs"

_MOST_BYTES = 2**30
"""Unpacked; an artifact of this package takes some megabytes."""


class ArtifactError(Exception):
    """The file is not what it should be; one line says how."""


def save_compiled(path: Path, cache: Path | None) -> bool:
    """Write what this process has compiled and used to `path`, in one step; False where that is nothing.

    `cache` is the folder that its caches lie in (`compile_cache_folder`); None leaves libraries out. Raises OSError.
    """
    bundle = torch.compiler.save_cache_artifacts()
    if bundle is None:
        return False
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        archive.writestr(GRAPHS, bundle[0])
        for library in _loaded_libraries(cache) if cache else ():
            archive.write(library, library.relative_to(os.path.realpath(cache or "")))
    journal.write_atomically(path, packed.getvalue())
    return True


def load_compiled(path: Path, sha256: str, cache: Path) -> None:
    """Bring what `path` holds into the compile caches of this process, whose folder is `cache`.

    What lies there already stays: another process may have it loaded. Raises ArtifactError where the file is missing,
    is not the one with this checksum, or cannot be read by this PyTorch, and OSError where `cache` cannot be written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ArtifactError("is not the file that was promised: its checksum differs")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
                raise ArtifactError(f"holds more than {_MOST_BYTES} bytes")
            graphs = archive.read(GRAPHS)
            for name in archive.namelist():
                if name != GRAPHS:
                    _place(cache, name, archive.read(name))
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ArtifactError(f"is damaged: {error}") from None
    if torch.compiler.load_cache_artifacts(graphs) is None:
        raise ArtifactError("holds graphs that this PyTorch cannot read")


def use_compiled(compiled: CompiledFile, cache: Path, source: str) -> str:
    """Load what was promised, where it was compiled on a machine like this one; a line says what came of it.

    `cache` is this machine's `compile_cache_folder`, `source` the identity of this package's source.
    """
    name = f"compiled code {compiled.file}"
    if compiled.machine != cache.name:
        return (
            f"{name} is not used: it was compiled on machine {compiled.machine}, and this is {cache.name} "
            "(devices, driver, torch, triton, CUDA, Python)"
        )
    if compiled.source != source:
        return f"{name} is not used: it was compiled from another version of this package"
    try:
        load_compiled(Path(compiled.file), compiled.sha256, cache)
    except (ArtifactError, OSError) as error:
        return f"{name} is not used: it {error if isinstance(error, ArtifactError) else f'cannot be unpacked: {error}'}"
    return f"{name} is used"


def _place(cache: Path, name: str, content: bytes) -> None:
    target = cache / name
    if not Path(os.path.realpath(target)).is_relative_to(os.path.realpath(cache)):
        raise ArtifactError(f"holds {name!r}, which is outside of the cache")
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal.write_atomically(target, content)


def _loaded_libraries(cache: Path) -> Iterator[Path]:
    """Files of the cache that this process has mapped; none where the system does not tell."""
    inside = os.path.realpath(cache)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    # Five columns, then the path, which may hold blanks.
    mapped = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) > 5}
    yield from (Path(path) for path in sorted(mapped) if Path(path).is_relative_to(inside) and os.path.isfile(path))
