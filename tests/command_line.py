"""A command line of the package, run in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """A command line that has ended."""

    status: int
    output: str
    wall_seconds: float = 0.0
    """Of its process, where that is measured."""


RunModule = Callable[..., Finished]

# Small enough to run for real in a test: real Ray, real processes, real tokens, a model of half a million.
TINY_RECIPE = """
model: {layers: 1, width: 16, heads: 2, ffn: 32, context: 64, vocab_size: 32000}
optimizer: {peak_learning_rate: 1e-3, betas: [0.9, 0.95]}
training: {tokens_per_update: 512, token_budget: 51_200, epochs: 2}
evaluation: {subset_blocks: 8}
"""

TINY_SPACE = """
baseline: {micro_batch_size: 8, cpu_threads: 1}
factors: {micro_batch_size: [4, 8], sdpa_backend: [auto, math]}
protocol: {warmup_updates: 1, windows: 2, updates_per_window: 2}
search_windows: by_count
"""

# Of any recipe, a study that ends after its baseline.
ONE_CANDIDATE = """
baseline: {micro_batch_size: 8, update: eager}
factors: {micro_batch_size: [8]}
protocol: {warmup_updates: 1, windows: 1, updates_per_window: 1}
"""
