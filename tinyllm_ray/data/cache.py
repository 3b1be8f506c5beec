"""What a token cache is: a folder with a manifest, a tokenizer and shards of token ids.

    CACHE/manifest.json     written last: a folder without one is no cache
    CACHE/tokenizer/        loads with transformers' AutoTokenizer, offline
    CACHE/train-00000.bin   token ids, little-endian; documents run on from shard to shard

Opening one checks the manifest and the files' sizes and reads no tokens. It needs numpy and pydantic alone.
"""

import bisect
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinyllm_ray.config import identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.validation import explain

MANIFEST: Final = "manifest.json"
TOKENIZER_FOLDER: Final = "tokenizer"
SCHEMA_VERSION: Final = 1
LAYOUT: Final = "each document, then one end-of-text token"

Tokens = npt.NDArray[np.unsignedinteger[Any]]
DtypeName = Literal["uint16", "uint32"]

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0)]
FORMATS: Final[dict[DtypeName, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_dtype(vocab_size: int) -> DtypeName:
    """The narrowest of the cache's formats that holds every id of a vocabulary."""
    if not 0 < vocab_size <= 2**32:
        raise ConfigError(f"a vocabulary of {vocab_size:,} entries does not fit: 1 to {2**32:,} are allowed")
    return "uint16" if vocab_size <= 2**16 else "uint32"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ShardEntry(_Entry):
    """One file of token ids."""

    split: str
    file: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name inside the cache's folder."""
    tokens: int = Field(gt=0)
    bytes: int
    sha256: _Sha256


class SplitTotals(_Entry):
    """A split as a whole."""

    tokens: _Count
    """End-of-text tokens included."""
    documents: _Count
    empty_documents: _Count
    """Left out: they add no token."""
    text_bytes: _Count
    """UTF-8 bytes of the text."""


class Preparation(_Entry):
    """How documents became shards."""

    shuffle_seed: int
    shuffle_buffer_documents: int
    shuffle_buffer_bytes: int = 2**26  # whichever of the two is reached first
    shard_tokens: int


class Manifest(_Entry):
    """The whole truth about a cache."""

    schema_version: Literal[1] = SCHEMA_VERSION
    identity: _Sha256
    """SHA-256 over what makes the tokens what they are; where they lie and what they came from is not part of it."""
    source: dict[str, Any]
    """What the documents were, for people."""
    preparation: Preparation
    tokenizer_fingerprint: _Sha256
    vocab_size: int = Field(gt=0)
    end_of_text: _Count
    """Id of the end-of-text token."""
    layout: Literal["each document, then one end-of-text token"]
    dtype: DtypeName
    splits: dict[str, SplitTotals]
    shards: list[ShardEntry]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype != token_dtype(self.vocab_size):
            raise ValueError(f"dtype {self.dtype} does not go with a vocabulary of {self.vocab_size}")
        if self.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text {self.end_of_text} must be below vocab_size {self.vocab_size}")
        width = FORMATS[self.dtype].itemsize
        for shard in self.shards:
            if shard.bytes != shard.tokens * width:
                raise ValueError(f"{shard.file}: {shard.tokens} tokens are {shard.tokens * width} bytes")
            if shard.split not in self.splits:
                raise ValueError(f"{shard.file}: its split {shard.split!r} is not under splits")
        for split, totals in self.splits.items():
            found = sum(shard.tokens for shard in self.shards if shard.split == split)
            if found != totals.tokens:
                raise ValueError(f"splits.{split}.tokens is {totals.tokens}, its shards hold {found}")
        if self.identity != self.token_identity():
            raise ValueError("identity does not belong to these shards; the manifest was changed by hand")
        return self

    def token_identity(self) -> str:
        """What `identity` has to be."""
        return _token_identity(self.model_dump(mode="json", exclude={"source", "preparation", "splits"}))


def new_manifest(
    *,
    source: dict[str, Any],
    preparation: Preparation,
    tokenizer_fingerprint: str,
    vocab_size: int,
    end_of_text: int,
    splits: dict[str, SplitTotals],
    shards: list[ShardEntry],
) -> Manifest:
    """A manifest with its dtype and its identity settled."""
    values = {
        "source": source,
        "preparation": preparation.model_dump(),
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "vocab_size": vocab_size,
        "end_of_text": end_of_text,
        "layout": LAYOUT,
        "dtype": token_dtype(vocab_size),
        "splits": {split: totals.model_dump() for split, totals in splits.items()},
        "shards": [shard.model_dump() for shard in shards],
    }
    return Manifest.model_validate(values | {"identity": _token_identity(values)})


def _token_identity(values: dict[str, Any]) -> str:
    kept = {key: values[key] for key in ("tokenizer_fingerprint", "vocab_size", "end_of_text", "layout", "dtype")}
    shards = [[shard["split"], shard["tokens"], shard["sha256"]] for shard in values["shards"]]
    return identity(kept | {"shards": shards})


class TokenCache:
    """A cache that was opened: its facts, and its tokens by range."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.dtype = FORMATS[manifest.dtype]
        self._shards: dict[str, list[ShardEntry]] = {split: [] for split in manifest.splits}
        for shard in manifest.shards:
            self._shards[shard.split].append(shard)
        self._starts = {
            split: [0, *itertools.accumulate(shard.tokens for shard in shards)]
            for split, shards in self._shards.items()
        }

    @property
    def identity(self) -> str:
        return self.manifest.identity

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    def shards(self, split: str) -> list[ShardEntry]:
        """The shards of a split in order. Raises ConfigError naming the splits there are."""
        if split not in self._shards:
            raise ConfigError(f"{self.folder}: there is no split {split!r}; it has {', '.join(self._shards)}")
        return self._shards[split]

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def read(self, split: str, start: int, stop: int) -> Tokens:
        """The tokens [start, stop) of a split, across shards.

        Raises ConfigError naming a shard that cannot be read, is too short or holds ids outside the vocabulary.
        """
        out: Tokens = np.empty(stop - start, self.dtype)
        self.read_into(split, start, out)
        return out

    def read_into(self, split: str, start: int, out: Tokens) -> None:
        """Fill `out`, one-dimensional and contiguous, with the tokens from `start` on; as `read` otherwise."""
        shards, starts = self.shards(split), self._starts[split]
        if start < 0 or start + out.size > starts[-1]:
            raise IndexError(f"{self.folder}: {split} holds {starts[-1]} tokens, not [{start}, {start + out.size})")
        index = bisect.bisect_right(starts, start) - 1
        filled = 0
        while filled < out.size:
            offset = start + filled - starts[index]
            part = out[filled : filled + shards[index].tokens - offset]
            path = self.folder / shards[index].file
            _read_exactly(path, shards[index].bytes, offset * self.dtype.itemsize, part)
            # An id outside the vocabulary would surface as a device-side assertion, with no word of the file.
            if (highest := int(part.max())) >= self.vocab_size:
                raise ConfigError(f"{path}: holds the id {highest}, below {self.vocab_size} expected; it is damaged")
            filled += part.size
            index += 1


def _read_exactly(path: Path, expected_bytes: int, offset_bytes: int, out: Tokens) -> None:
    view = out.view(np.uint8).data
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_bytes)
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    found = file.seek(0, 2)
                    raise ConfigError(f"{path}: {found:,} bytes, {expected_bytes:,} expected; prepare the cache again")
                done += count
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}), {expected_bytes:,} bytes expected; "
            "prepare the cache again"
        ) from error


def open_cache(path: str | Path) -> TokenCache:
    """The cache in the folder `path`, its manifest and the files' sizes checked.

    Raises ConfigError naming the folder or file and what was expected there.

    >>> from tinyllm_ray.data.cache import open_cache
    >>> from tinyllm_ray.data.prepare import default_cache
    >>> cache = open_cache(default_cache())
    >>> cache.vocab_size, cache.dtype
    (32000, dtype('uint16'))
    >>> cache.tokens("train") > 2_000_000
    True
    >>> cache.read("train", 1000, 1008).shape
    (8,)
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        file = folder / shard.file
        try:
            found = file.stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{file}: {error.strerror}; {folder / MANIFEST} lists it with {shard.bytes:,} bytes, "
                "prepare the cache again"
            ) from error
        if found != shard.bytes:
            raise ConfigError(f"{file}: {found:,} bytes, {shard.bytes:,} expected; prepare the cache again")
    return TokenCache(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; the shards are not looked at. Raises ConfigError naming what is wrong with it."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        if not folder.exists():
            raise ConfigError(f"{folder}: no such folder; a prepared token cache was expected there") from None
        raise ConfigError(
            f"{folder}: holds no {MANIFEST}, so it is no token cache or its preparation never ended; prepare it again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, Manifest, str(path))) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from None
