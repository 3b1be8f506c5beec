"""What the frequencies of single tokens tell of a cache: the loss that a model has to get below."""

from typing import Final

import numpy as np
import numpy.typing as npt

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import ConfigError

_CHUNK_TOKENS: Final = 2**20


def unigram_level(
    cache: TokenCache,
    alpha: float = 0.1,
    train: str = "train",
    validation: str = "validation",
    most_tokens: int = 10_000_000,
) -> float:
    """Nats a token that word frequencies alone reach: what a model must beat to have learnt anything more.

    Cross-entropy of the validation tokens under the training counts, `alpha` added to each. Of either split the first
    `most_tokens` count: at ten million the level of a large cache is known to about 0.01.
    """
    counts = _count(cache, train, most_tokens).astype(np.float64) + alpha
    seen = _count(cache, validation, most_tokens)
    return float(seen @ (np.log(counts.sum()) - np.log(counts)) / seen.sum())


def _count(cache: TokenCache, split: str, most_tokens: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(cache.vocab_size, np.int64)
    tokens = min(cache.tokens(split), most_tokens)
    if tokens == 0:
        raise ConfigError(f"{cache.folder}: the split {split!r} holds no tokens")
    for start in range(0, tokens, _CHUNK_TOKENS):
        chunk = cache.read(split, start, min(start + _CHUNK_TOKENS, tokens))
        counts += np.bincount(chunk, minlength=cache.vocab_size)
    return counts
