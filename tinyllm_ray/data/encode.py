"""Turns batches of documents into tokens: a function of tokenizer and text alone, so that any process may run it."""

import functools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyllm_ray.data.cache import Tokens, token_dtype
from tinyllm_ray.data.tokenizer import SavedTokenizer
from tinyllm_ray.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECE_BYTES: Final = 2**17
_GROUP_BYTES: Final = 2**18
"""Text a call of the tokenizer; it takes some 50 bytes for each while it works."""
_BORDER: Final = re.compile(rb"(?<=[A-Za-z]) (?=[A-Za-z])")
"""Where no token of a byte-level BPE can reach across: its pattern lets a word begin with the space."""


class Encoded(NamedTuple):
    """A batch of documents as tokens, one end of text after each."""

    tokens: Tokens
    documents: int
    empty_documents: int
    text_bytes: int


def encode(tokenizer: SavedTokenizer, documents: list[bytes]) -> Encoded:
    """The documents' tokens in order. Text that reads like a special token is text; an empty document adds nothing.

    Raises ConfigError where an id does not fit, and for a text that can only become an end of text.
    """
    loaded = _load(tokenizer.fingerprint, tokenizer.data)
    special = np.array(sorted(tokenizer.special.values()), np.int64)
    end = _narrow(np.array([tokenizer.end_of_text], np.int64), tokenizer)
    parts: list[Tokens] = []
    begun = False
    texts = 0
    for group in _groups(documents, loaded.cuttable):
        for ids, last in zip(_ids(loaded.backend, group, tokenizer, special), (last for _, last in group), strict=True):
            begun |= ids.size > 0
            parts.append(ids)
            if last and begun:
                parts.append(end)
                texts += 1
            begun &= not last
    return Encoded(
        tokens=np.concatenate(parts) if parts else end[:0],
        documents=texts,
        empty_documents=len(documents) - texts,
        text_bytes=sum(map(len, documents)),
    )


_Piece = tuple[bytes, bool]
"""Text, and whether a document ends with it."""


def _groups(documents: list[bytes], cuttable: bool) -> Iterator[list[_Piece]]:
    """Pieces for one call of the tokenizer each, so that its memory is bounded."""
    group: list[_Piece] = []
    size = 0
    for document in documents:
        for piece in cut_between_words(document) if cuttable else [(document, True)]:
            if group and size + len(piece[0]) > _GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(piece)
            size += len(piece[0])
    if group:
        yield group


def cut_between_words(document: bytes) -> Iterator[_Piece]:
    """Pieces of about 128 KB, cut where a byte-level BPE sees no word go on."""
    start = 0
    while len(document) - start > _PIECE_BYTES:
        border = _BORDER.search(document, start + _PIECE_BYTES)
        if border is None:
            break
        yield document[start : border.start()], False
        start = border.start()
    yield document[start:] if start else document, True


def _ids(
    backend: "Tokenizer", group: list[_Piece], tokenizer: SavedTokenizer, special: npt.NDArray[np.int64]
) -> list[Tokens]:
    texts = [piece.decode() for piece, _ in group]
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    found = [np.array(encoding.ids, np.int64) for encoding in encodings]
    if np.isin(np.concatenate(found), special).any():
        found = [
            _apart(backend, text, tokenizer) if np.isin(ids, special).any() else ids
            for text, ids in zip(texts, found, strict=True)
        ]
    return [_narrow(ids, tokenizer) for ids in found]


def _apart(backend: "Tokenizer", text: str, tokenizer: SavedTokenizer) -> npt.NDArray[np.int64]:
    """A text's ids where a special token's own text is an entry of the vocabulary like any word: cut, it is found no
    more."""
    spelt = sorted((one for one in tokenizer.special if len(one) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(f"(?<={re.escape(one[0])})(?={re.escape(one[1:])})" for one in spelt))
    encodings = backend.encode_batch_fast(pattern.split(text), add_special_tokens=False)
    ids = np.array([number for encoding in encodings for number in encoding.ids], np.int64)
    if (ids == tokenizer.end_of_text).any():
        raise ConfigError(
            f"{tokenizer.folder}: the tokenizer turns a document's text into its end-of-text token "
            f"(near {text[:40]!r}); choose another tokenizer"
        )
    return ids


def _narrow(wide: npt.NDArray[np.int64], tokenizer: SavedTokenizer) -> Tokens:
    # Checked before the cast, which would wrap in silence.
    if wide.size and not 0 <= int(wide.min()) <= int(wide.max()) < tokenizer.vocab_size:
        raise ConfigError(
            f"{tokenizer.folder}: the tokenizer gave the id {int(wide.max())}, its vocabulary ends at "
            f"{tokenizer.vocab_size - 1}"
        )
    narrow: Tokens = wide.astype(token_dtype(tokenizer.vocab_size))
    return narrow


class _Loaded(NamedTuple):
    backend: "Tokenizer"
    cuttable: bool
    """Whether a long document may be encoded in pieces without a token being another."""


@functools.lru_cache(maxsize=4)
def _load(fingerprint: str, data: bytes) -> _Loaded:
    """A tokenizer, once a process."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(data.decode())
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return _Loaded(backend, _is_cuttable(json.loads(data)))


def _is_cuttable(values: dict[str, Any]) -> bool:
    """Only what is known for certain: GPT-2's pattern over bytes, nothing done to the text before, no chance in it."""
    before, model = values["pre_tokenizer"], values["model"]
    return (
        values["normalizer"] is None
        and before is not None
        and (before["type"], before.get("use_regex"), before.get("add_prefix_space")) == ("ByteLevel", True, False)
        and (model.get("type"), model.get("dropout")) == ("BPE", None)
        and all(one["special"] for one in values["added_tokens"])
    )
