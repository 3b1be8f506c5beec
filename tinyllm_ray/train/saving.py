"""When a run's checkpoints are due, and writing them without the run coming to harm."""

import dataclasses
import logging
import sys
import time
from pathlib import Path

from tinyllm_ray.clock import Clock
from tinyllm_ray.command import say
from tinyllm_ray.train.checkpoints import prune, save_checkpoint
from tinyllm_ray.train.state import RunState
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.weights import CheckpointWriteError

log = logging.getLogger(__name__)


class Saving:
    """The checkpoints of the run in folder `out`, of which that of `saved_step` is there already."""

    def __init__(
        self, out: Path, trainer: Trainer, cache_identity: str, saved_step: int, clock: Clock = time.perf_counter
    ) -> None:
        self.saved_step = saved_step
        """Step of the newest checkpoint that is known to be whole."""
        self._out, self._trainer, self._cache_identity, self._clock = out, trainer, cache_identity, clock
        self._output = trainer.config.output

    def due(self, step: int) -> bool:
        """Whether the policy wants one of update `step`, beside the last one and that of an interruption."""
        if self._output.checkpoint == "interval":
            assert self._output.checkpoint_interval is not None
            return step % self._output.checkpoint_interval == 0
        return self._output.checkpoint == "explicit" and step in (self._output.checkpoint_updates or ())

    def save(self, state: RunState) -> None:
        """A checkpoint of the present; one that cannot be written costs that checkpoint and nothing else."""
        if self.saved_step == state.step:
            return
        trainer, began = self._trainer, self._clock()
        try:
            save_checkpoint(
                self._out,
                state.step,
                trainer.model,
                trainer.optimizer,
                dataclasses.asdict(state),
                trainer.config,
                self._cache_identity,
                average=trainer.config.packing.mixed,
            )
            self.saved_step = state.step
            always = self._output.checkpoint_updates or ()
            prune(self._out, self._output.keep_checkpoints, always=always, trusted=[state.step])
        except CheckpointWriteError as error:
            state.failed_checkpoints += 1
            log.error("%s", error)
            say(f"checkpoint: {error}; training goes on", sys.stderr)
        state.checkpoint_seconds += self._clock() - began

    def save_last(self, state: RunState) -> bool:
        """The checkpoint that a run ends with, unless the policy wants none; False where one is missing."""
        if self._output.checkpoint == "none" or not state.step:
            return True
        self.save(state)
        return self.saved_step == state.step
