"""A folder as a few large files with checksums: what a shared file system reads fast, where ten thousands of small
files take minutes.

A pack is a folder with `manifest.json` and tar files of about equal size, which are written and unpacked side by side.
Its name has a key over what is in it, so that a pack that is there need not be made again. A pack appears whole or not
at all. Standard library only: a node unpacks before anything else can be imported.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

from tinyllm_ray.cluster.stage_bytecode import compiled
from tinyllm_ray.cluster.stage_files import Entry
from tinyllm_ray.errors import TinyllmRayError
from tinyllm_ray.figures import told_apart

MANIFEST = "manifest.json"
_FORMAT = 2
_PARTS = 8
_FILE_COST_BYTES = 64 * 1024
"""What a file costs beside its bytes: 50,000 files of 3 GB unpack about as fast as 6 GB in large ones."""
_KEPT_SECONDS = 7 * 24 * 3600.0
"""A pack that no job has used for so long is removed when another of its name is made."""
_ROOM = 1.05
_BYTECODE = "__pycache__"


class DamagedError(TinyllmRayError):
    """A pack does not hold what its manifest says."""


def key_of(files: Iterable[Entry], *facts: str) -> str:
    """Sixteen hex digits over names, sizes and times, and over further facts.

    Python's bytecode does not count: it appears as modules are used, and says nothing that they do not.
    """
    digest = hashlib.sha256(repr((_FORMAT, facts)).encode())
    for entry in files:
        if _BYTECODE not in entry.name:
            digest.update(f"{entry.name}\0{entry.size}\0{entry.modified_ns}\n".encode())
    return digest.hexdigest()[:16]


def make_pack(packs: Path, name: str, key: str, files: Sequence[Entry], **facts: Any) -> Path:
    """The pack `name-key` in the folder `packs`, made unless it is there; `facts` go into its manifest.

    Any number of jobs may ask at once: each makes its own, and the first one to be whole stays. Raises OSError where
    the folder has no room.
    """
    target = packs / f"{name}-{key}"
    if _is_whole(target):
        with contextlib.suppress(OSError):
            os.utime(target / MANIFEST)  # it is in use
        return target
    packs.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = packs / f".{target.name}.{secrets.token_hex(8)}"
    making.mkdir(mode=0o700)
    try:
        groups = _split(files, _PARTS)
        with _workers(len(groups)) as pool:
            jobs = [(making / f"part-{number}.tar", group) for number, group in enumerate(groups)]
            parts = list(pool.map(_write_part, jobs))
        manifest = {
            "format": _FORMAT,
            "name": name,
            "key": key,
            "files": len(files),
            "bytes": sum(entry.size for entry in files),
            "folders": sorted({os.path.dirname(entry.name) for entry in files} - {""}),
            "parts": parts,
            **facts,
        }
        (making / MANIFEST).write_text(json.dumps(manifest))
        if not _is_whole(target):  # what a site's purge of old files has left of it
            _remove(target)
        with contextlib.suppress(OSError):  # another job was faster
            making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _forget_old(packs, name, target)
    return target


def unpack(pack: Path, target: Path) -> dict[str, Any]:
    """Unpack into the folder `target`, which is new; the manifest.

    Raises DamagedError where the pack is not what it was when it was made, and OSError where there is no room; then
    nothing of it is left.
    """
    manifest = read_manifest(pack)
    needed = _ROOM * (manifest["bytes"] + 4096 * manifest["files"])
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        wanted, there = told_apart(".1f", needed / 2**30, free / 2**30)
        raise OSError(f"{wanted} GiB are needed in {target.parent}, and {there} are free")
    target.mkdir(mode=0o700)
    try:
        for folder in manifest["folders"]:  # first, as two parts that make the same one are in each other's way
            (target / folder).mkdir(parents=True, exist_ok=True)
        with _workers(len(manifest["parts"])) as pool:
            for problem in pool.map(_read_part, [(pack, part, target) for part in manifest["parts"]]):
                if problem:
                    raise DamagedError(problem)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return manifest


def read_manifest(pack: Path) -> dict[str, Any]:
    """A pack's manifest. Raises DamagedError where it is none."""
    try:
        manifest: dict[str, Any] = json.loads((pack / MANIFEST).read_bytes())
        sizes = [(pack / part["file"]).stat().st_size == part["bytes"] for part in manifest["parts"]]
        if manifest["format"] == _FORMAT and all(sizes):
            return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{pack}: {type(error).__name__}: {error}") from None
    raise DamagedError(f"{pack}: a part has not the size it had")


def newest(packs: Path, name: str) -> Path | None:
    """The pack of that name that was made or used last, and is whole; None where there is none."""
    found = [(path.stat().st_mtime, path.parent) for path in packs.glob(f"{name}-*/{MANIFEST}")]
    return next((pack for _, pack in sorted(found, reverse=True) if _is_whole(pack)), None)


def forget_damaged(pack: Path) -> None:
    """Have the next job make a pack anew, whose content is not what it was; who reads it now goes on reading."""
    with contextlib.suppress(OSError):
        (pack / MANIFEST).unlink()


def _is_whole(pack: Path) -> bool:
    """Whether all parts are there, in their sizes."""
    try:
        read_manifest(pack)
    except DamagedError:
        return False
    return True


def _remove(pack: Path) -> None:
    """Out of the way at once, and then for good."""
    aside = pack.with_name(f".{pack.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        pack.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _split(files: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Groups that cost about the same, each a run of neighbours."""
    total = sum(entry.size + _FILE_COST_BYTES for entry in files)
    groups: list[list[Entry]] = [[]]
    spent = 0
    for entry in files:
        if spent * most >= total * len(groups) and groups[-1]:
            groups.append([])
        groups[-1].append(entry)
        spent += entry.size + _FILE_COST_BYTES
    return [group for group in groups if group]


def _workers(parts: int) -> ProcessPoolExecutor:
    # Processes, as tarfile is Python; forked, as there is nothing here that a fork could break.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ProcessPoolExecutor(max(1, min(parts, cores)), mp_context=get_context("fork"))


class _Hashed:
    """A file that hashes what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _write_part(job: tuple[Path, Sequence[Entry]]) -> dict[str, Any]:
    path, files = job
    with path.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|", bufsize=2**20, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for entry in files:
                tar.dereference = not entry.is_link
                with contextlib.suppress(FileNotFoundError):
                    if entry.to_compile:
                        _add_bytecode(tar, entry)
                    else:
                        tar.add(entry.path, entry.name, recursive=False)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}


def _add_bytecode(tar: tarfile.TarFile, entry: Entry) -> None:
    data = compiled(entry.path)
    if data is not None:
        member = tarfile.TarInfo(entry.name)
        member.size, member.mtime, member.mode = len(data), entry.modified_ns / 1e9, 0o644
        tar.addfile(member, io.BytesIO(data))


def _read_part(job: tuple[Path, dict[str, Any], Path]) -> str | None:
    """Unpack one part; what is wrong with it."""
    pack, part, target = job
    path = pack / part["file"]
    with path.open("rb") as file:
        hashed = _Hashed(file)
        try:
            with tarfile.open(fileobj=hashed, mode="r|", bufsize=2**20) as tar:  # type: ignore[call-overload]
                tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.4 has it, and 3.14 another
                for member in tar:
                    if member.name.startswith("/") or ".." in Path(member.name).parts:
                        return f"{path}: {member.name!r} would lie outside of {target}"
                    tar.extract(member, target)
        except tarfile.TarError as error:
            return f"{path}: {error}"
        while hashed.read(2**20):  # what lies behind the archive's end
            pass
    return None if hashed.digest.hexdigest() == part["sha256"] else f"{path}: its checksum is another one"


def _forget_old(packs: Path, name: str, keep: Path) -> None:
    """Packs that no job uses, and what killed jobs have left of theirs."""
    used = {pack: pack / MANIFEST for pack in packs.glob(f"{name}-*") if pack != keep}
    for pack, seen in {**used, **{left: left for left in packs.glob(f".{name}-*")}}.items():
        with contextlib.suppress(OSError):
            if time.time() - (seen if seen.exists() else pack).stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(pack, ignore_errors=True)
