"""A node's own copy of a token cache, where a job has put one there."""

import os
from pathlib import Path

from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.errors import ConfigError

VARIABLE = "TINYLLM_RAY_STAGED_TOKENS"
"""Folder that holds copies, each under its cache's identity."""


def staged_copy(cache: TokenCache) -> TokenCache:
    """The copy of `cache` on this node; `cache` itself where there is none, or not a whole one."""
    root = os.environ.get(VARIABLE)
    if not root:
        return cache
    try:
        copy = open_cache(Path(root) / cache.identity)
    except ConfigError:
        return cache
    return copy if copy.identity == cache.identity else cache
