"""Tokenizers as a cache keeps them: trained or taken over, saved in a folder, and opened again."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.journal import write_atomically
from tinyllm_ray.modules import require

END_OF_TEXT: Final = "<|endoftext|>"
TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
SMALLEST_VOCABULARY: Final = 257
"""Every byte, and the end of text."""
LARGEST_VOCABULARY: Final = 2**20
"""Four times the largest that is known; the trainer sets memory aside for all entries before it begins."""
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer with what a cache has to know of it; it can be sent to any process."""

    folder: Path
    fingerprint: str
    """SHA-256 of tokenizer.json, which alone decides the ids."""
    vocab_size: int
    """One above the highest id."""
    end_of_text: int
    special: dict[str, int]
    """Texts and ids of tokens that no text may become, the end of text among them."""
    data: bytes = field(repr=False)
    """Content of tokenizer.json: a worker on another machine does not see the folder."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> SavedTokenizer:
    """Train a byte-level BPE of `vocab_size` entries, the end of text among them, and save it in `folder`.

    AutoTokenizer loads the folder. Equal texts give equal files. Raises ConfigError for a vocabulary that cannot hold
    all bytes, or that no memory holds.
    """
    require("tokenizers", f"--tokenizer bpe:{vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"a byte-level vocabulary of {vocab_size} is too small; use {SMALLEST_VOCABULARY} or more")
    if vocab_size > LARGEST_VOCABULARY:
        raise ConfigError(f"a byte-level vocabulary of {vocab_size:,} is too large; use {LARGEST_VOCABULARY:,} or less")
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
    return _save(tokenizer.to_str(pretty=True), {"eos_token": END_OF_TEXT}, folder)


def take_tokenizer(name: str, revision: str | None, folder: Path) -> SavedTokenizer:
    """Save in `folder` what AutoTokenizer loads for `name`. Raises ConfigError where it cannot serve."""
    require("transformers", f"--tokenizer {name}")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    # Its own errors and the hub client's are OSError and ValueError; a damaged file's come from parsers of all kinds.
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(
            f"--tokenizer {name}: cannot be loaded: {' '.join(str(error).split()):.400}; "
            "name a tokenizer's folder, one of the hub as owner/name, or bpe:32000 to train one"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"--tokenizer {name}: has no tokenizer.json and is too slow for a corpus; choose another")
    special = {key: str(getattr(loaded, key)) for key in _SPECIAL_NAMES if getattr(loaded, key, None)}
    if "eos_token" not in special:
        raise ConfigError(f"--tokenizer {name}: has no end-of-text token (eos_token); choose another")
    return _save(_settled(backend.to_str(), set(special.values())), special, folder)


def _settled(text: str, special: set[str]) -> str:
    """The tokenizer as it would have been written here, so that its fingerprint does not depend on who loaded it."""
    from tokenizers import Tokenizer

    values = json.loads(text)
    for one in values["added_tokens"]:
        # Only tokens that are marked as special can be told not to be found in text.
        one["special"] |= one["content"] in special
    after = values["post_processor"] or {}
    if after.get("type") == "TemplateProcessing" and not after["special_tokens"]:
        values["post_processor"] = None  # transformers' own addition, which adds nothing
    return str(Tokenizer.from_str(json.dumps(values)).to_str(pretty=True))


def _save(text: str, special: dict[str, str], folder: Path) -> SavedTokenizer:
    """Write a tokenizer so that every version of transformers opens it."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | special | {"clean_up_tokenization_spaces": False}
    folder.mkdir(parents=True, exist_ok=True)
    # Not through save_pretrained: it names a class that only its own major version of transformers knows, and reports
    # a full disk as a bare Exception.
    write_atomically(folder / TOKENIZER_FILE, text.encode())
    write_atomically(folder / CONFIG_FILE, json.dumps(settings, indent=2).encode() + b"\n")
    return open_tokenizer(folder)


def is_saved(folder: Path) -> bool:
    """Whether a tokenizer was written to `folder` to the end."""
    return (folder / CONFIG_FILE).exists()


def open_tokenizer(folder: Path) -> SavedTokenizer:
    """The tokenizer that was saved in `folder`. Raises ConfigError where it names no end of text."""
    from tokenizers import Tokenizer

    try:
        data = (folder / TOKENIZER_FILE).read_bytes()
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        values = json.loads(data)
        entries = Tokenizer.from_str(data.decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library has no other kind
        raise ConfigError(f"{folder}: holds no tokenizer that can be read: {error}") from error
    named = {key: _token_text(settings.get(key)) for key in _SPECIAL_NAMES}
    end = named["eos_token"]
    if end not in entries:
        raise ConfigError(f"{folder}: the tokenizer has no end-of-text token (eos_token is {end!r}); choose another")
    # An unknown word is a text's own token, unless it is the end of text.
    unknown = {named.pop("unk_token"), _unknown(values["model"])} - {end}
    marked = {one["content"] for one in values.get("added_tokens", ()) if one["special"]}
    special = {text: entries[text] for text in sorted(marked | set(filter(None, named.values()))) if text in entries}
    special = {text: number for text, number in special.items() if text not in unknown}
    return SavedTokenizer(
        folder, hashlib.sha256(data).hexdigest(), max(entries.values()) + 1, entries[end], special, data
    )


def _unknown(model: dict[str, Any]) -> str | None:
    """The text of a model's token for what it does not know."""
    if model.get("type") == "Unigram":
        place = model.get("unk_id")
        return None if place is None else str(model["vocab"][place][0])
    return model.get("unk_token")


def _token_text(setting: Any) -> Any:
    """Older transformers write a special token as a mapping."""
    return setting.get("content") if isinstance(setting, dict) else setting
