"""Says in one line that memory does not suffice for a training, and what to lower."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError


@contextmanager
def memory_named(config: Config) -> Iterator[None]:
    """Raises ConfigError where memory was what was missing: the configuration asks for more than there is."""
    try:
        yield
    except Exception as error:
        from tinyllm_ray.train.trial import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        logging.getLogger(__name__).exception("out of memory")
        raise ConfigError(
            f"out of memory ({' '.join(str(error).split()):.200}); lower execution.micro_batch_size, "
            f"{config.micro_batch_size} here, or the model's size, or try execution.recompute_activations=true"
        ) from None
