"""Reads a whole cache again and names every file of it that is not what the manifest says."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np

from tinyllm_ray.data.cache import FORMATS, TOKENIZER_FOLDER, Manifest, ShardEntry, read_manifest
from tinyllm_ray.data.progress import Report, silent
from tinyllm_ray.data.tokenizer import TOKENIZER_FILE

_CHUNK_BYTES: Final = 2**22


@dataclass(frozen=True)
class Fault:
    """A file that is wrong."""

    file: Path
    kind: str
    """missing, short, long, flipped, unreadable, or foreign: ids that the vocabulary does not have."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind}: {self.expected} expected, {self.found} found"


def verify(folder: Path, workers: int, report: Report = silent) -> list[Fault]:
    """Every fault of the cache in `folder`, in the order of its shards; threads read it.

    Raises ConfigError for a manifest that cannot be read.
    """
    manifest = read_manifest(folder)
    total = sum(shard.bytes for shard in manifest.shards)
    found: dict[str, list[Fault]] = {}
    done = 0
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_check, folder, shard, manifest): shard for shard in manifest.shards}
        report("verifying", 0, total)
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                shard = futures[future]
                found[shard.file] = list(future.result())
                done += shard.bytes
                wrong = sum(map(bool, found.values()))
                detail = f"{count:,} of {len(futures):,} shards, {done / 1e6:,.0f} MB, {wrong:,} wrong"
                report("verifying", done, total, detail)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    shards = [fault for shard in manifest.shards for fault in found[shard.file]]
    return shards + list(_check_tokenizer(folder, manifest))


def _check(folder: Path, shard: ShardEntry, manifest: Manifest) -> list[Fault]:
    path = folder / shard.file
    expected = f"{shard.bytes:,} bytes"
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return [Fault(path, "short" if size < shard.bytes else "long", expected, f"{size:,} bytes")]
        digest, highest = _read(path, FORMATS[manifest.dtype])
    except FileNotFoundError:
        return [Fault(path, "missing", expected, "nothing")]
    except OSError as error:
        return [Fault(path, "unreadable", expected, error.strerror or str(error))]
    if digest != shard.sha256:
        return [Fault(path, "flipped", f"SHA-256 {shard.sha256}", digest)]
    if highest >= manifest.vocab_size:
        return [Fault(path, "foreign", f"ids below {manifest.vocab_size:,}", f"the id {highest:,}")]
    return []


def _read(path: Path, dtype: "np.dtype[np.unsignedinteger]") -> tuple[str, int]:
    """A shard's checksum and its highest id."""
    digest = hashlib.sha256()
    highest = 0
    chunk = np.empty(_CHUNK_BYTES // dtype.itemsize, dtype)
    with path.open("rb", buffering=0) as file:
        view = chunk.view(np.uint8).data
        while count := _fill(file, view):
            digest.update(view[:count])
            highest = max(highest, int(chunk[: count // dtype.itemsize].max(initial=0)))
    return digest.hexdigest(), highest


def _fill(file: FileIO, view: memoryview) -> int:
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done


def _check_tokenizer(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    path = folder / TOKENIZER_FOLDER / TOKENIZER_FILE
    expected = f"SHA-256 {manifest.tokenizer_fingerprint}"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        yield Fault(path, "missing", expected, "nothing")
    except OSError as error:
        yield Fault(path, "unreadable", expected, error.strerror or str(error))
    else:
        if found != manifest.tokenizer_fingerprint:
            yield Fault(path, "flipped", expected, found)
