"""The trainer every trial and every real run shares: builds what a configuration asks for and steps it."""

import logging
import math
import time
from contextlib import ExitStack

import torch

from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.feed import Feed, SyntheticFeed, device_feed, widen
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.data.served_ranges import open_ranges
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.sections import CPU_SDPA_BACKENDS
from tinyllm_ray.train.determinism import determinism
from tinyllm_ray.train.host_memory import keep_freed_memory
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.recipe import check_fits, learning_rate
from tinyllm_ray.train.update import Statistics, Update

log = logging.getLogger(__name__)

_MOST_THREADS_BESIDE_A_GPU = 8


class Trainer:
    """One model in training; satisfies `measure.windows.Measured`.

    It goes on after `updates` updates, whose rows it leaves out; weights and optimizer state are the caller's to put
    back. `cache` None trains on one synthetic batch that stays on the device. `range_server` is the address of the
    node's server of token ranges, where there is one. `stage_seconds` says where the start's time went. Use it as a
    context manager, or call `close`, which also gives the process back the settings of determinism that it had.
    """

    def __init__(
        self,
        config: Config,
        cache: TokenCache | None,
        range_server: str | None = None,
        clock: Clock = time.perf_counter,
        updates: int = 0,
    ) -> None:
        if cache is not None:
            check_fits(config, cache)
        self.config = config
        self.updates = updates
        self.stage_seconds: dict[str, float] = {}
        self._last: Statistics | None = None
        with ExitStack() as open_until_closed:
            open_until_closed.enter_context(determinism(config))  # before CUDA starts
            self._start(cache, range_server, clock)
            open_until_closed.callback(self.feed.close)
            self._open = open_until_closed.pop_all()

    def _start(self, cache: TokenCache | None, range_server: str | None, clock: Clock) -> None:
        config = self.config
        begin = clock()
        self.device = choose_device(config)
        self.threads = settle_threads(config, self.device)
        torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        torch.zeros(1, device=self.device)
        self.synchronize()
        self.stage_seconds["runtime"] = clock() - begin
        begin = clock()
        self.model: Llama = initialize(config.model, config.training.seed).to(self.device)
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device)
        self._update = Update(self.model, self.optimizer, config)
        self.stage_seconds["model_and_optimizer"] = clock() - begin
        begin = clock()
        self.feed = _build_feed(config, cache, self.device, range_server, self.updates)
        self.stage_seconds["loader"] = clock() - begin

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    @property
    def targets_per_update(self) -> int:
        return self.config.training.tokens_per_update

    @property
    def data_wait_seconds(self) -> float:
        return self.feed.wait_seconds

    def step(self) -> Statistics:
        """Queue one update; nothing is read from the device."""
        batch = widen(self.feed.next())
        self._last = self._update(batch, learning_rate(self.config, self.updates))
        self.updates += 1
        return self._last

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def read(self) -> tuple[float, float]:
        if self._last is None:
            return math.nan, math.nan
        return float(self._last.loss), float(self._last.grad_norm)


def choose_device(config: Config) -> torch.device:
    """The GPU this process was given, else the CPU. Raises ConfigError where it cannot run the execution."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    backend = config.execution.sdpa_backend
    if backend not in CPU_SDPA_BACKENDS:
        raise ConfigError(
            f"execution.sdpa_backend: {backend!r} needs a GPU, and there is none; a CPU has "
            + ", ".join(CPU_SDPA_BACKENDS)
        )
    return torch.device("cpu")


def settle_threads(config: Config, device: torch.device) -> int:
    """Threads of CPU operators: as set, else every usable core, at most 8 beside a GPU (more only share its host)."""
    cores = usable_cores()
    default = min(cores, _MOST_THREADS_BESIDE_A_GPU) if device.type == "cuda" else cores
    return config.execution.cpu_threads or default


def _build_feed(
    config: Config, cache: TokenCache | None, device: torch.device, range_server: str | None, updates: int
) -> Feed:
    rows, context = config.rows_per_update, config.model.context
    if cache is None:
        return SyntheticFeed(rows, context, config.model.vocab_size, device, seed=config.training.seed)
    loader = RowLoader(
        cache,
        context=context,
        seed=config.training.seed,
        shards_per_range=config.data.shards_per_range,
        read_ahead=config.execution.prefetch_depth,
        start_row=updates * rows,
        ranges=open_ranges(cache, range_server),
    )
    return device_feed(loader, rows, device)
