"""Tokenizers as a cache keeps them: trained or taken over, saved in a folder, and run over batches of documents."""

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tinyllm_ray.data.cache import Tokens, token_dtype
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_TRANSFORMERS_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}
_SMALLEST_VOCABULARY = 257  # every byte, and the end of text


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer's folder with what a cache has to know of it; small enough to be sent to any process."""

    folder: Path
    fingerprint: str
    """SHA-256 of tokenizer.json, which alone decides the ids."""
    vocab_size: int
    """One above the highest id."""
    end_of_text: int


class Encoded(NamedTuple):
    """A batch of documents as tokens, one end of text after each."""

    tokens: Tokens
    documents: int
    empty_documents: int
    text_bytes: int


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> SavedTokenizer:
    """Train a byte-level BPE of `vocab_size` entries, the end of text among them, and save it in `folder`.

    AutoTokenizer loads the folder. Equal texts give equal files. Raises ConfigError for a vocabulary that cannot hold
    all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(f"a byte-level vocabulary of {vocab_size} is too small; use {_SMALLEST_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # In the alphabet's own order, which changes from process to process, two trainings give other ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    # Not through save_pretrained: it names a class that only its own major version of transformers knows, and reports
    # a full disk as a bare Exception.
    write_atomically(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
    write_atomically(folder / CONFIG_FILE, json.dumps(_TRANSFORMERS_CONFIG, indent=2).encode() + b"\n")
    return open_tokenizer(folder)


def open_tokenizer(folder: Path) -> SavedTokenizer:
    """The tokenizer that `save_pretrained` left in `folder`. Raises ConfigError where it names no end of text."""
    try:
        data = (folder / TOKENIZER_FILE).read_bytes()
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: holds no tokenizer that can be read: {error}") from error
    fingerprint = hashlib.sha256(data).hexdigest()
    entries = _backend(folder, fingerprint).get_vocab(with_added_tokens=True)
    end = _token_text(settings.get("eos_token"))
    if end not in entries:
        raise ConfigError(f"{folder}: the tokenizer has no end-of-text token (eos_token is {end!r}); choose another")
    return SavedTokenizer(folder, fingerprint, max(entries.values()) + 1, entries[end])


def encode(tokenizer: SavedTokenizer, texts: list[str]) -> Encoded:
    """The documents' tokens in order. Text that reads like a special token is text; an empty document adds nothing.

    A function of its arguments alone, so that any process may run it. Raises ConfigError where an id does not fit.
    """
    encodings = _backend(tokenizer.folder, tokenizer.fingerprint).encode_batch_fast(texts, add_special_tokens=False)
    ids: list[int] = []
    documents = 0
    for encoding in encodings:
        if document := encoding.ids:
            ids += document
            ids.append(tokenizer.end_of_text)
            documents += 1
    return Encoded(
        tokens=_narrow(ids, tokenizer),
        documents=documents,
        empty_documents=len(texts) - documents,
        text_bytes=sum(len(text.encode()) for text in texts),
    )


def _narrow(ids: list[int], tokenizer: SavedTokenizer) -> Tokens:
    wide = np.array(ids, dtype=np.int64)
    # Checked before the cast, which would wrap in silence.
    if wide.size and not 0 <= int(wide.min()) <= int(wide.max()) < tokenizer.vocab_size:
        raise ConfigError(
            f"{tokenizer.folder}: the tokenizer gave the id {int(wide.max())}, its vocabulary ends at "
            f"{tokenizer.vocab_size - 1}"
        )
    narrow: Tokens = wide.astype(token_dtype(tokenizer.vocab_size))
    return narrow


@functools.lru_cache(maxsize=4)
def _backend(folder: Path, fingerprint: str) -> "Tokenizer":
    """The tokenizer of a folder, once a process; the fingerprint keeps another one in the same place apart."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_text(setting: Any) -> Any:
    """Older transformers write a special token as a mapping."""
    return setting.get("content") if isinstance(setting, dict) else setting
