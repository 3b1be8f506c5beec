"""The trainer every trial and every real run shares: builds what a configuration asks for and steps it."""

import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.feed import Feed, SyntheticFeed, device_feed
from tinyllm_ray.data.interleave import InterleavedLoader
from tinyllm_ray.data.loader import Loader, RowLoader
from tinyllm_ray.data.served_ranges import open_ranges
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import needs_gpu, options_of
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.model.llama import Llama, initialize
from tinyllm_ray.model.operations import TORCH, operations_of
from tinyllm_ray.records import Memory
from tinyllm_ray.train.determinism import determinism
from tinyllm_ray.train.graph_update import build_run
from tinyllm_ray.train.host_memory import keep_freed_memory
from tinyllm_ray.train.optimizer import build_optimizer
from tinyllm_ray.train.pack import Pack, model_seeds
from tinyllm_ray.train.recipe import check_fits, learning_rate
from tinyllm_ray.train.update import Statistics, Update, check_batch

if TYPE_CHECKING:
    from tinyllm_ray.train.flat_update import FlatUpdate

log = logging.getLogger(__name__)

_MOST_THREADS_BESIDE_A_GPU = 8


class Trainer:
    """A recipe's model in training, or its pack of models; satisfies `measure.windows.Measured`.

    It goes on after `updates` updates, whose rows it leaves out; weights and optimizer state are the caller's to put
    back. `cache` None trains on one synthetic batch that stays on the device. `range_server` is the address of the
    node's server of token ranges, where there is one. `stage_seconds` says where the start's time went. Use it as a
    context manager, or call `close`, which also gives the process back the settings of determinism that it had.

    >>> from tinyllm_ray.config import load
    >>> from tinyllm_ray.train.trainer import Trainer
    >>> config = load("nano", ["model.layers=1", "training.tokens_per_update=512", "execution.cpu_threads=1"])
    >>> with Trainer(config, cache=None) as trainer:
    ...     losses = [float(trainer.step().loss) for _ in range(3)]
    >>> losses[2] < losses[0], trainer.updates
    (True, 3)
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
            self._start(cache, range_server, clock, open_until_closed)
            open_until_closed.callback(self.feed.close)
            self._open = open_until_closed.pop_all()

    def _start(
        self, cache: TokenCache | None, range_server: str | None, clock: Clock, open_until_closed: ExitStack
    ) -> None:
        config = self.config
        begin = clock()
        self.device = choose_device(config)
        torch.set_num_threads(settle_threads(config, self.device))
        self.threads = torch.get_num_threads()  # what counts, whatever OMP_NUM_THREADS was: Ray sets it in its actors
        if self.device.type == "cpu":
            keep_freed_memory()
        # A GPU's runtime takes 0.2 s to start, and drawing the weights of 20m as long on a core: one beside the other.
        ahead = self.device.type == "cuda" and config.packing.models == 1
        with ThreadPoolExecutor(1) as beside:
            drawn = beside.submit(draw_model, config) if ahead else None
            torch.zeros(1, device=self.device)
            self.synchronize()
        self.stage_seconds["runtime"] = clock() - begin
        begin = clock()
        self._trainee = (
            Pack(config, self.device)
            if config.packing.models > 1
            else Solo(config, self.device, drawn.result() if drawn else None)
        )
        if isinstance(self._trainee, Pack):
            open_until_closed.callback(self._trainee.close)
        open_until_closed.callback(self._trainee.run.close)
        self.model, self.optimizer = self._trainee.model, self._trainee.optimizer
        self.stage_seconds["model_and_optimizer"] = clock() - begin
        begin = clock()
        self.feed = build_feed(config, cache, self.device, range_server, self.updates)
        self.stage_seconds["loader"] = clock() - begin

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    @property
    def targets_per_update(self) -> int:
        """Of all models."""
        return self.config.targets_per_update

    @property
    def data_wait_seconds(self) -> float:
        return self.feed.wait_seconds

    def step(self) -> Statistics:
        """Queue one update; nothing is read from the device. Statistics of a pack are [N]."""
        self._last = self._trainee.step(self.feed.next(), self.updates)
        self.updates += 1
        return self._last

    def evaluation_models(self) -> list[Llama]:
        """What is evaluated, as the last update left it: the model; of a mixed pack its average; else its N models.

        The same objects every time, so that what is compiled of them stays so; an average is brought up to date by
        this call alone.
        """
        return self._trainee.evaluation_models()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def consensus_distance(self) -> float | None:
        """How far apart the models of a mixed pack are, relative to their average's norm; else None, at no cost."""
        return self._trainee.consensus_distance() if isinstance(self._trainee, Pack) else None

    def peak_memory(self) -> Memory:
        """Peaks so far, of all processes of the training."""
        trainee = self._trainee
        return trainee.peak_memory() if isinstance(trainee, Pack) else peak_memory(self.device)

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm of the last update; of a pack the means over its models."""
        if self._last is None:
            return math.nan, math.nan
        return _mean(self._last.loss), _mean(self._last.grad_norm)


class Solo:
    """One model as the trainer steps it."""

    def __init__(self, config: Config, device: torch.device, drawn: Llama | None = None) -> None:
        """`drawn` is what `draw_model` gives, where that has been made ahead."""
        self._config = config
        self.model = (drawn or draw_model(config)).to(device)
        self.optimizer, self._update = _build_update(self.model, config, device)
        self.run = build_run(self._update.run, config, device)
        self._evaluated: list[Llama] = []

    def step(self, batch: torch.Tensor, update: int) -> Statistics:
        """Update `update` (0-based) on rows [R, context + 1] of whole numbers."""
        check_batch(batch, self._config)
        self._update.prepare(learning_rate(self._config, update))
        return self.run(batch)

    def evaluation_models(self) -> list[Llama]:
        self._evaluated = self._evaluated or [self.model.sharing(TORCH)]
        return self._evaluated


def draw_model(config: Config) -> Llama:
    """One model's first weights, on the CPU."""
    return initialize(config.model, config.training.seed, operations_of(config.execution))


def _build_update(
    model: Llama, config: Config, device: torch.device
) -> "tuple[torch.optim.Optimizer, Update | FlatUpdate]":
    """What trains `model`, whose parameters may be others afterwards."""
    if config.execution.optimizer_kernel == "triton":
        from tinyllm_ray.train.flat_update import FlatUpdate  # Triton takes a second to import

        flat = FlatUpdate(model, config)
        return flat.optimizer, flat
    optimizer = build_optimizer(model, config.optimizer, device, captured=config.execution.update == "graph")
    return optimizer, Update(model, optimizer, config)


def choose_device(config: Config) -> torch.device:
    """The GPU this process was given, else the CPU. Raises ConfigError where it cannot run the execution."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # then Triton's kernels run anywhere, slowly
    beyond = [
        (key, value)
        for key, value in config.execution
        if needs_gpu(key, value) and not (interpreted and value == "triton")
    ]
    if beyond:  # all at once: whoever takes a GPU's answer to a CPU has to set each
        options = {key: ", ".join(one for one in options_of(key) if not needs_gpu(key, one)) for key, _ in beyond}
        names = ", ".join(f"execution.{key}: {value!r} (a CPU has {options[key]})" for key, value in beyond)
        raise ConfigError(f"{names} need{'s' * (len(beyond) == 1)} a GPU, and there is none")
    return torch.device("cpu")


def settle_threads(config: Config, device: torch.device) -> int:
    """Threads of CPU operators: as set, else every usable core, at most 8 beside a GPU (more only share its host)."""
    cores = usable_cores()
    default = min(cores, _MOST_THREADS_BESIDE_A_GPU) if device.type == "cuda" else cores
    return config.execution.cpu_threads or default


def build_feed(
    config: Config, cache: TokenCache | None, device: torch.device, range_server: str | None, updates: int
) -> Feed:
    """The batches of a training that has had `updates` updates; without a cache one batch, every time."""
    rows, context = config.batch_rows, config.model.context
    if cache is None:
        return SyntheticFeed(rows, context, config.model.vocab_size, device, seed=config.training.seed)

    def open_loader(seed: int) -> RowLoader:
        return RowLoader(
            cache,
            context=context,
            seed=seed,
            shards_per_range=config.data.shards_per_range,
            read_ahead=config.execution.prefetch_depth,
            start_row=updates * config.rows_per_update,
            ranges=open_ranges(cache, range_server),
        )

    # Mixed models share one order, out of whose every N rows each takes its own.
    one_order = config.packing.mixed or config.packing.models == 1
    loader: Loader = (
        open_loader(config.training.seed) if one_order else InterleavedLoader(model_seeds(config), open_loader)
    )
    return device_feed(loader, rows, device)


def _mean(values: torch.Tensor) -> float:
    """A scalar as it is; of [N] the mean, which is nan where one is: an execution that harms one model is no better."""
    return float(values.mean())
