"""A recipe from its first update to its result, with everything a run leaves in its folder.

`config.yaml`, `environment.json` and `train.log` from the start; `metrics.jsonl` (a line an update) and `best.json` as
it goes; `model.safetensors` and `result.json` at the end.
"""

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tinyllm_ray import journal
from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache, Tokens, unigram_level
from tinyllm_ray.data.loader import subset_batches, validation_batches
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError
from tinyllm_ray.measure.environment import collect_environment, source_identity
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.train.evaluate import evaluate
from tinyllm_ray.train.progress import Progress
from tinyllm_ray.train.recipe import epoch_ends, learning_rate, run_updates
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics
from tinyllm_ray.train.weights import save_weights

log = logging.getLogger(__name__)

_UPDATES_A_READ = 20
"""Losses are read back together: one wait for the device instead of twenty (a wait costs about 0.1 ms of queueing)."""


@dataclass
class _State:
    """What a run accumulates."""

    training_seconds: float = 0.0
    pending: list[Statistics] = field(default_factory=list)
    read_at: float = 0.0
    best: dict[str, Any] | None = None
    epochs: int = 0
    loss: float = math.nan
    finite: bool = True


def prepare_folder(out: Path) -> None:
    """Make the run's folder. Raises ConfigError when it holds something already or cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"--out {out}: the folder is not empty; choose another or remove it")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; choose a folder that can be written") from None


def describe_passes(config: Config, cache: TokenCache) -> str | None:
    """A line for people where the run needs more tokens than the cache has; None where it does not."""
    targets, tokens = run_updates(config) * config.training.tokens_per_update, cache.tokens("train")
    if targets < tokens:
        return None
    return (
        f"the run's {targets:,} targets pass {targets / tokens:.1f} times over the {tokens:,} training tokens of "
        f"{cache.folder}, each time in another order"
    )


class Run:
    """One training run into the folder `out`; `execute` returns the exit status."""

    def __init__(
        self,
        config: Config,
        cache: TokenCache,
        out: Path,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._config = config
        self._cache = cache
        self._out = out
        self._on_progress = on_progress
        self._clock = clock
        self._began = clock()
        self._state = _State()
        self._signal = 0

    def execute(self) -> int:
        """Train, evaluate, write the result."""
        (self._out / "config.yaml").write_text(self._config.to_yaml())
        self._write_json("environment.json", collect_environment())
        with _Interruptible(self._interrupt), Trainer(self._config, self._cache) as trainer:
            log.info("start: %s", ", ".join(f"{name} {s:.2f} s" for name, s in trainer.stage_seconds.items()))
            self._train(trainer)
            if self._config.output.checkpoint == "final" and self._state.finite:
                save_weights(trainer.model, self._out / "model.safetensors")
            validation = self._validate(trainer) if self._state.finite and not self._signal else None
            status = "failed" if not self._state.finite else "interrupted" if self._signal else "complete"
            self._write_json("result.json", self._result(trainer, status, validation))
        return {"complete": EXIT_DONE, "failed": EXIT_NO_RESULT, "interrupted": 128 + self._signal}[status]

    def _train(self, trainer: Trainer) -> None:
        state, ends, total = self._state, epoch_ends(self._config), run_updates(self._config)
        state.read_at = self._clock()
        while trainer.updates < total and state.finite and not self._signal:
            state.pending.append(trainer.step())
            epoch = ends.get(trainer.updates)
            last = trainer.updates == total
            if len(state.pending) == _UPDATES_A_READ or epoch or last or trainer.updates == 1:
                self._read(trainer)
            if state.finite and (epoch or last) and not self._signal:
                state.epochs = epoch or state.epochs
                self._evaluate_subset(trainer)
                state.read_at = self._clock()
        if state.pending:
            self._read(trainer)

    def _read(self, trainer: Trainer) -> None:
        """Wait for the pending updates and write their metrics."""
        state = self._state
        values = torch.stack([torch.stack(pair) for pair in state.pending]).tolist()
        now = self._clock()
        seconds = now - state.read_at
        state.training_seconds += seconds
        rate = len(values) * trainer.targets_per_update / seconds
        first = trainer.updates - len(values)
        for offset, (loss, grad_norm) in enumerate(values):
            state.finite = state.finite and math.isfinite(loss) and math.isfinite(grad_norm)
            if not state.finite:
                log.error("update %d: loss %s, gradient norm %s", first + offset + 1, loss, grad_norm)
                break
            state.loss = loss
            self._write_metrics(trainer, first + offset, loss, grad_norm, rate)
        state.pending.clear()
        state.read_at = now
        self._on_progress(Progress(trainer.updates, run_updates(self._config), state.loss, rate))

    def _write_metrics(self, trainer: Trainer, update: int, loss: float, grad_norm: float, rate: float) -> None:
        line = {
            "step": update + 1,
            "tokens": (update + 1) * trainer.targets_per_update,
            "loss": loss,
            "lr": learning_rate(self._config, update),
            "grad_norm": grad_norm,
            "tokens_per_second": rate,
            "training_seconds": self._state.training_seconds,
            "data_wait_seconds": trainer.data_wait_seconds,
        }
        with (self._out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _evaluate_subset(self, trainer: Trainer) -> None:
        config, state = self._config, self._state
        batches = subset_batches(
            self._cache,
            config.model.context,
            config.micro_batch_size,
            blocks=config.evaluation.subset_blocks,
            seed=config.evaluation.subset_seed,
        )
        evaluated = self._evaluate(trainer, batches)
        if evaluated is None:
            return
        loss, targets = evaluated
        log.info("update %d, epoch %d: subset loss %.4f over %d targets", trainer.updates, state.epochs, loss, targets)
        if not math.isfinite(loss):
            # An update's own loss is that of the weights before it, so the last update's harm shows only here.
            log.error("update %d left weights whose loss is %s", trainer.updates, loss)
            state.finite = False
            return
        if state.best is None or loss < state.best["loss"]:
            state.best = {"loss": loss, "epoch": state.epochs, "step": trainer.updates}
            self._write_json("best.json", state.best)

    def _evaluate(self, trainer: Trainer, batches: Iterator[Tokens]) -> tuple[float, int] | None:
        """Loss and number of targets; None where a signal ended it on the way."""

        def until_signal() -> Iterator[Tokens]:
            for batch in batches:
                if self._signal:
                    raise _SignalledError
                yield batch

        try:
            return evaluate(trainer.model, until_signal(), self._config.execution.sdpa_backend)
        except _SignalledError:
            return None

    def _result(self, trainer: Trainer, status: str, validation: dict[str, Any] | None) -> dict[str, Any]:
        config, state = self._config, self._state
        source = source_identity()
        tokens = trainer.updates * trainer.targets_per_update
        elapsed = self._clock() - self._began
        return {
            "status": status,
            "signal": self._signal or None,
            "parameters": config.model.parameters,
            "tokens": tokens,
            "step": trainer.updates,
            "epochs": state.epochs,
            "best": state.best,
            "validation": validation,
            "levels": {"uniform": math.log(self._cache.vocab_size), "unigram": unigram_level(self._cache)},
            "training_seconds": state.training_seconds,
            "training_elapsed_seconds": elapsed,
            "training_tokens_per_second": tokens / state.training_seconds if state.training_seconds else None,
            "elapsed_tokens_per_second": tokens / elapsed,
            "data_wait_seconds": trainer.data_wait_seconds,
            "start_seconds": trainer.stage_seconds,
            "memory": peak_memory(trainer.device).model_dump(),
            "device": str(trainer.device),
            "recipe_identity": config.recipe_identity,
            "cache_identity": self._cache.identity,
            "source_identity": source.sha256,
            "source_dirty": source.dirty,
        }

    def _validate(self, trainer: Trainer) -> dict[str, Any] | None:
        """The whole validation split; None where a signal ended it."""
        config = self._config
        begin = self._clock()
        batches = validation_batches(self._cache, config.model.context, config.micro_batch_size)
        evaluated = self._evaluate(trainer, batches)
        if evaluated is None:
            return None
        loss, targets = evaluated
        return {
            "loss": loss,
            "perplexity": math.exp(loss),
            "tokens": targets,
            "seconds": self._clock() - begin,
            "split": "validation",
            "validation_complete": True,
        }

    def _write_json(self, name: str, value: Any) -> None:
        journal.write_atomically(self._out / name, (json.dumps(value, indent=2) + "\n").encode())

    def _interrupt(self, number: int) -> None:
        self._signal = number
        line = f"{signal.Signals(number).name}: ending after the update in flight; once more ends at once"
        log.warning(line)
        print(line, file=sys.stderr, flush=True)


class _SignalledError(Exception):
    """A signal came while validation batches were read."""


class _Interruptible:
    """While entered, the first SIGINT or SIGTERM asks for an orderly end; the next one has its usual effect."""

    def __init__(self, interrupt: Callable[[int], None]) -> None:
        self._interrupt = interrupt
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._interrupt(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
