"""Prepares token caches: any source on request, step by step and resumable, and the default corpus on first use."""

import contextlib
import errno
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.clock import Clock
from tinyllm_ray.data.build_once import build_once
from tinyllm_ray.data.cache import TOKENIZER_FOLDER, Preparation, TokenCache, open_cache
from tinyllm_ray.data.corpus import SOURCE, corpus_identity, corpus_installed
from tinyllm_ray.data.encode import cut_between_words
from tinyllm_ray.data.order import Shuffler
from tinyllm_ray.data.progress import Report, reporter, silent
from tinyllm_ray.data.resume import REQUEST, begun, forget_leftovers
from tinyllm_ray.data.sources import Meter, Source, SourceOptions, open_source
from tinyllm_ray.data.tokenizer import SavedTokenizer, is_saved, open_tokenizer, take_tokenizer, train_tokenizer
from tinyllm_ray.data.write import MapBatches, Totals, write_cache
from tinyllm_ray.errors import ConfigError

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TINYLLM_RAY_CACHE"
DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_SHARD_TOKENS = 2**19  # small, so that the two million tokens of the default corpus make several ranges
DEFAULT_FORMAT = 1  # raised whenever this package makes other tokens of the same corpus
SHUFFLE_SEED: Final = 42
SHUFFLE_BUFFER_DOCUMENTS: Final = 10_000
SHARD_TOKENS: Final = 2**25
TRAINED_PREFIX: Final = "bpe:"
TRAINING_BYTES: Final = 2**26
"""Text a tokenizer is trained on, the first in shuffled order: more changes little and takes memory."""
_DISK_ERRORS: Final = frozenset(
    getattr(errno, name)
    for name in [
        "ENOSPC",
        "EDQUOT",
        "EFBIG",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "ENOTDIR",
        "EEXIST",
        "ENAMETOOLONG",
        "ESTALE",
    ]
)


@dataclass(frozen=True)
class Request:
    """What a cache is to be made from, and how."""

    sources: tuple[str, ...] = (SOURCE,)
    options: SourceOptions = field(default_factory=SourceOptions)
    tokenizer: str = f"{TRAINED_PREFIX}{DEFAULT_VOCAB_SIZE}"
    """`bpe:SIZE` to train one, else what AutoTokenizer loads."""
    tokenizer_revision: str | None = None
    preparation: Preparation = field(
        default_factory=lambda: Preparation(
            shuffle_seed=SHUFFLE_SEED, shuffle_buffer_documents=SHUFFLE_BUFFER_DOCUMENTS, shard_tokens=SHARD_TOKENS
        )
    )


def prepare(
    request: Request,
    out: Path,
    *,
    map_batches: MapBatches = map,
    report: Report = silent,
    clock: Clock = time.monotonic,
) -> tuple[TokenCache, bool]:
    """The cache that `request` asks for in the folder `out`, and whether it was there already.

    A session that was ended is gone on with: the same request in the same folder gives the same bytes. Raises
    ConfigError for what cannot be read or written, and for a folder that was begun for another request.
    """
    try:
        return _prepare(request, out, map_batches, report, clock)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); what is there is kept: "
            "make room and run the same command again to go on"
        ) from error


def _prepare(
    request: Request, out: Path, map_batches: MapBatches, report: Report, clock: Clock = time.monotonic
) -> tuple[TokenCache, bool]:
    # Where it was begun before it holds JSON, and may lie among the documents.
    source = open_source(request.sources, request.options, out if (out / REQUEST).exists() else None)
    described = source.description | _describe_tokenizer(request)
    facts = {
        "source": source.facts,
        "tokenizer": request.tokenizer,
        "tokenizer_revision": request.tokenizer_revision,
        "preparation": request.preparation.model_dump(),
    }
    with begun(out, facts) as done:
        if done:
            return open_cache(out), True
        forget_leftovers(out)
        tokenizer = _tokenizer(request, source, out / TOKENIZER_FOLDER, report)
        meter = Meter()
        cache = write_cache(
            out,
            source.read(meter),
            tokenizer,
            described,
            splits=source.splits,
            preparation=request.preparation,
            map_batches=map_batches,
            progress=_progress(meter, report, clock),
        )
        return cache, False


def _describe_tokenizer(request: Request) -> dict[str, Any]:
    if size := _trained_size(request.tokenizer):
        return {"tokenizer": f"byte-level BPE of {size} entries, trained on the train split"}
    revision = {"tokenizer_revision": request.tokenizer_revision} if request.tokenizer_revision else {}
    return {"tokenizer": request.tokenizer} | revision


def _trained_size(tokenizer: str) -> int | None:
    """The vocabulary of a tokenizer that is to be trained; None for one that is taken over."""
    if not tokenizer.startswith(TRAINED_PREFIX):
        return None
    size = tokenizer.removeprefix(TRAINED_PREFIX).replace("_", "").replace(",", "")
    if not size.isdecimal():
        raise ConfigError(
            f"--tokenizer {tokenizer}: {TRAINED_PREFIX} is followed by a number of entries, as in bpe:32000"
        )
    return int(size)


def _tokenizer(request: Request, source: Source, folder: Path, report: Report) -> SavedTokenizer:
    size = _trained_size(request.tokenizer)
    if is_saved(folder):
        return open_tokenizer(folder)  # of an earlier session
    if size is None:
        report(f"loading the tokenizer {request.tokenizer}", 0, None)
        return take_tokenizer(request.tokenizer, request.tokenizer_revision, folder)
    report(f"training a tokenizer of {size:,} entries", 0, None)
    return train_tokenizer(_training_texts(source, request.preparation), size, folder)


def _training_texts(source: Source, preparation: Preparation) -> Iterator[str]:
    shuffler = Shuffler(
        f"{preparation.shuffle_seed}/train", preparation.shuffle_buffer_documents, preparation.shuffle_buffer_bytes
    )
    left = TRAINING_BYTES
    train = (text for split, text in source.read(Meter()) if split == "train")
    pushed = itertools.chain.from_iterable(map(shuffler.push, train))
    for text in itertools.chain(pushed, shuffler.drain()):
        # In pieces: of a text of 64 MB at once the trainer's own list of words takes gigabytes.
        for piece, _ in cut_between_words(text[:left]):
            yield piece.decode(errors="ignore")
        left -= len(text)
        if left <= 0:
            return


def _progress(meter: Meter, report: Report, clock: Clock) -> Callable[[Totals], None]:
    first: tuple[float, int] | None = None

    def show(totals: Totals) -> None:
        nonlocal first
        now = clock()
        first = first or (now, totals.text_bytes)
        seconds = max(now - first[0], 1e-9)
        rate = (totals.text_bytes - first[1]) / seconds / 1e6
        detail = f"{totals.documents:,} documents, {totals.tokens:,} tokens, {rate:.1f} MB/s"
        report("tokenizing", meter.done, meter.total, detail)

    return show


def cache_root() -> Path:
    """Where caches of this package live: $TINYLLM_RAY_CACHE, else the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "tinyllm_ray"
    try:
        return Path.home() / ".cache" / "tinyllm_ray"
    except RuntimeError:
        raise ConfigError(f"there is no home folder to keep a token cache in; set ${CACHE_VARIABLE}") from None


def default_cache(progress: bool = True) -> Path:
    """The folder of the default corpus's token cache, built on first use with `progress` on stderr.

    Any number of processes may ask at once: one builds and the others wait. Raises ConfigError where the cache folder
    cannot be written or the corpus is missing.
    """
    target = _default_folder(cache_root())
    if _opens(target):
        return target
    if target.exists():
        log.warning("%s: the default token cache is damaged and is built again", target)
    with reporter(f"default token cache in {target}") if progress else contextlib.nullcontext(silent) as report:
        try:
            build_once(
                target,
                functools.partial(_build_default, report=report),
                _opens,
                waiting=lambda: report("waiting for another process that builds it", 0, None),
            )
        except OSError as error:
            raise ConfigError(
                f"{target}: the default token cache cannot be written ({error.strerror or error}); "
                f"set ${CACHE_VARIABLE} to a folder with 20 MB free, or data.cache to a prepared cache"
            ) from error
    return target


def _default_folder(root: Path) -> Path:
    """Named after everything that decides its content, so that another corpus or format is another folder."""
    name = f"{SOURCE}-{DEFAULT_VOCAB_SIZE}-v{DEFAULT_FORMAT}"
    if corpus_installed():
        return root / f"{name}-{corpus_identity()[:12]}"
    # A cache that was carried to a machine without the corpus serves it all the same.
    carried = sorted(root.glob(f"{name}-*"))
    return carried[0] if len(carried) == 1 else root / f"{name}-{corpus_identity()[:12]}"


def _opens(folder: Path) -> bool:
    try:
        open_cache(folder)
    except ConfigError:
        return False
    return True


def default_request() -> Request:
    """What the default cache is made from."""
    request = Request()
    return replace(request, preparation=request.preparation.model_copy(update={"shard_tokens": DEFAULT_SHARD_TOKENS}))


def _build_default(folder: Path, report: Report) -> None:
    _prepare(default_request(), folder, map, report)
