"""Says in one line that memory does not suffice for what a configuration asks, and what to lower."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tinyllm_ray.errors import ConfigError


@contextmanager
def memory_named(advice: str) -> Iterator[None]:
    """Raises ConfigError, with the `advice`, where memory was what was missing: that is a mistake in the request."""
    try:
        yield
    except Exception as error:
        from tinyllm_ray.train.trial import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        logging.getLogger(__name__).info("out of memory", exc_info=error)
        raise ConfigError(f"out of memory ({' '.join(str(error).split()):.200}); {advice}") from None
