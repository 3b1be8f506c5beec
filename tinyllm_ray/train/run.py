"""A recipe from its first update to its result: when to read losses, evaluate, save and end.

In the run's folder lie `config.yaml`, `environment.json` and `train.log` from the start; `metrics.jsonl` (a line an
update), `evaluations.jsonl`, `best.json` and `checkpoints/` as it goes; `result.json` at the end, whatever the end.
"""

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, TinyllmRayError
from tinyllm_ray.measure.environment import collect_environment, devices
from tinyllm_ray.train.checkpoint import Checkpoint
from tinyllm_ray.train.diagnosis import explain_fault
from tinyllm_ray.train.faults import Faults, note_stop
from tinyllm_ray.train.folder import RESULT, begin_result, bring_curves, left_at_start, lock_folder, writable
from tinyllm_ray.train.interruption import Interruption
from tinyllm_ray.train.judged_evaluations import JudgedEvaluations
from tinyllm_ray.train.packed_optimizer import PackedAdamW
from tinyllm_ray.train.progress import OnProgress, Progress, Starting
from tinyllm_ray.train.recipe import epoch_ends, run_updates
from tinyllm_ray.train.recording import Recording
from tinyllm_ray.train.result import build_result, failed_result
from tinyllm_ray.train.saving import Saving
from tinyllm_ray.train.stages import Stages
from tinyllm_ray.train.state import RunState
from tinyllm_ray.train.tally import note_distance, tally
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics
from tinyllm_ray.train.validation import Validation
from tinyllm_ray.train.watch import Phases, Watch

log = logging.getLogger(__name__)

_MOST_PENDING_UPDATES = 20
"""Losses are read back together: one wait for the device instead of twenty (a wait costs about 0.1 ms of queueing)."""
_MOST_PENDING_SECONDS = 0.5
"""A signal waits for what is queued, so slow updates are read back sooner."""


class Run:
    """One session of a training run into the folder `out`; `execute` returns the exit status.

    It goes on from `checkpoint` where there is one, and ends after update `stop_at`, interrupted, where that comes
    before the recipe's end. `interruption` is who hears the signals, `stages` where the start's time went so far.
    """

    def __init__(
        self,
        config: Config,
        cache: TokenCache,
        out: Path,
        *,
        checkpoint: Checkpoint | None = None,
        stop_at: int | None = None,
        on_progress: OnProgress = lambda event: None,
        interruption: Interruption | None = None,
        stages: Stages | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        assert stop_at is None or stop_at > 0
        self._config, self._cache, self._out = config, cache, Path(out)
        self._checkpoint, self._on_progress = checkpoint, on_progress
        self._interruption = interruption or Interruption()
        self._stages, self._clock = stages or Stages(clock=clock), clock
        self._began = clock() - self._stages.total
        self._total = run_updates(config)
        self._start = checkpoint.step if checkpoint else 0
        self._stop = self._total if stop_at is None else min(self._total, stop_at)
        self._ends = epoch_ends(config)
        self._state = RunState()
        self._pending: list[Statistics] = []
        self._most_pending = 1
        self._trainer: Trainer | None = None
        self._ended = False
        """Whether result.json is written."""
        self._before = RunState()
        """As the sessions before left it."""
        self._faults = Faults()
        self._proof_seconds = 0.0

    def execute(self) -> int:
        """Train, evaluate, write the result. Raises ConfigError where the folder cannot be written, or is in use."""
        with lock_folder(self._out):
            before = begin_result(self._out, self._config.to_yaml())
            if self._checkpoint is not None:
                bring_curves(self._checkpoint.path, self._out)
            with writable(self._out):
                self._recording = Recording(self._out, self._start, self._config.output.tensorboard)
            # Before the first update, on another thread: nothing was done in this session that would be lost.
            self._interruption.leave = lambda number: self._write_result(left_at_start(before, number))
            try:
                return self._execute()
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._interruption.leave = lambda number: None

    def _execute(self) -> int:
        write = self._recording.write_json
        environment = threading.Thread(target=lambda: write("environment.json", collect_environment()), daemon=True)
        with Trainer(self._config, self._cache, updates=self._start) as trainer:
            self._stages.end("run_metadata", **trainer.stage_seconds)
            if self._checkpoint is not None:
                self._restore(trainer, self._checkpoint)
            self._validation = Validation(trainer, self._cache, self._interruption, self._on_progress, self._clock)
            self._evaluations = JudgedEvaluations(self._validation, self._recording, self._faults)
            saved = self._start if self._checkpoint and self._checkpoint.path.is_relative_to(self._out) else -1
            self._saving = Saving(self._out, trainer, self._cache.identity, saved, self._clock)
            self._trainer = trainer
            if (self._out / "best.json").exists():  # of a session whose later part is made again
                self._recording.write_json("best.json", self._state.best or self._state.bests)
            environment.start()  # nvidia-smi and git take seconds, which the first update hides
            self._watch = Watch(self._config, devices()[0], self._validation.compiled)
            self._watch.begin(self._stop - self._start, self._validation.expected_targets)
            if self._start < self._stop:
                self._update_first(trainer)
            with self._interruption.orderly():
                self._train(trainer)
                status = self._finish(trainer)
                environment.join()
                self._interruption.leave = lambda number: None
        return status

    def _restore(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        checkpoint.load_weights(trainer.model)
        self._state = RunState(**checkpoint.load_training(trainer.model, trainer.optimizer))
        self._state.sessions += 1
        self._before = dataclasses.replace(self._state)
        self._stages.end("restore")
        log.info("goes on from %s", checkpoint.path)

    def _give_up(self, error: BaseException) -> None:
        """Save what is sound and say what ended the run; whatever fails in this is of less interest than `error`."""
        if self._ended:
            return
        reason = f"{type(error).__name__}: {error}"
        try:
            if self._trainer is not None:
                if self._pending:
                    self._read(self._trainer, self._clock())
                self._saving.save_last(self._state)
        except Exception:
            log.exception("after %s", reason)
        self._write_result(failed_result(self._config, self._state, reason))
        self._recording.close()

    def _update_first(self, trainer: Trainer) -> None:
        """The update that starts and compiles: a signal ends the process at once, since nothing is lost by it."""
        if self._evaluation_due(trainer.updates):  # a signal kept it from the session before
            with self._interruption.orderly():
                self._reach(trainer)
            self._stages.end("evaluation")
            if not self._goes_on:
                return
        began = self._clock()
        how = "running" if self._config.execution.update == "eager" else "compiling"
        self._on_progress(Starting(f"{how} the first update"))
        self._pending.append(trainer.step())
        self._read(trainer, began, counted=False)
        self._stages.end("first_update")
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._stages.seconds.items())
        log.info("first update after %.2f s: %s", self._stages.total, stages)

    def _train(self, trainer: Trainer) -> None:
        self._reach(trainer)
        began = self._clock()
        while trainer.updates < self._stop and self._goes_on:
            if self._watch.proof_due(trainer):
                self._prove(trainer, began)
                began = self._clock()
                continue
            self._pending.append(trainer.step())
            if self._is_stop(trainer.updates) or len(self._pending) >= self._most_pending:
                self._read(trainer, began)
                self._reach(trainer)
                began = self._clock()
        if self._pending:
            self._read(trainer, began)

    def _prove(self, trainer: Trainer, began: float) -> None:
        """Profile the next updates, up to one at which something is due; throughput is that of the others."""
        if self._pending:
            self._read(trainer, began)
            if not self._goes_on:
                return
        began, step = self._clock(), trainer.updates
        most = next(count for count in range(1, self._stop - step + 1) if self._is_stop(step + count))
        self._pending += self._watch.prove(trainer, most)
        self._read(trainer, began, counted=False)
        self._proof_seconds += self._clock() - began
        self._reach(trainer)

    def _is_stop(self, step: int) -> bool:
        """Whether what was queued is read back at update `step`, because something is due at it."""
        return step == self._stop or self._evaluation_due(step) or self._saving.due(step)

    @property
    def _goes_on(self) -> bool:
        return not self._interruption.number and self._faults.fault is None

    def _reach(self, trainer: Trainer) -> None:
        """Whatever is due at the present update."""
        if self._evaluation_due(trainer.updates) and self._goes_on:
            self._evaluations.subset(self._state, self._ends.get(trainer.updates, self._state.epochs))
        if self._saving.due(trainer.updates) and self._goes_on:
            self._note_seconds(trainer)
            self._saving.save(self._state)

    def _evaluation_due(self, step: int) -> bool:
        return (step in self._ends or step == self._total) and step > self._state.evaluated_step

    def _read(self, trainer: Trainer, began: float, counted: bool = True) -> None:
        """Wait for the pending updates, queued since `began`, and write their metrics."""
        state = self._state
        values = torch.stack([torch.stack([seen.loss, seen.grad_norm]) for seen in self._pending]).tolist()
        seconds = self._clock() - began
        targets = len(values) * trainer.targets_per_update
        if counted:
            state.training_seconds += seconds
            state.training_targets += targets
            self._watch.note(targets, seconds)
            self._most_pending = max(1, min(_MOST_PENDING_UPDATES, int(_MOST_PENDING_SECONDS * len(values) / seconds)))
        self._note_seconds(trainer)
        before = dict(state.stopped)
        lines, broken = tally(self._config, state, values, targets / seconds)
        self._pending.clear()
        if lines and self._evaluation_due(state.step):
            note_distance(state, lines[-1], trainer.consensus_distance())
        self._recording.metrics(lines)
        for model in state.stopped.keys() - before.keys():
            where = explain_fault(trainer, self._cache, state.stopped[model] - 1, int(model))
            note_stop(int(model), state.stopped[model], where)
        if broken is not None:
            where = explain_fault(trainer, self._cache, state.step, broken.models[0])
            self._faults.fail(state.step + 1, broken.losses, where, broken.grad_norms)
            if isinstance(trainer.optimizer, PackedAdamW):
                trainer.optimizer.go_on(range(len(broken.losses)) if self._config.packing.mixed else broken.models)
        if state.loss is not None:
            self._on_progress(Progress(state.step, self._total, state.loss, targets / seconds))

    def _note_seconds(self, trainer: Trainer) -> None:
        """Bring the sums over sessions up to date."""
        before, state = self._before, self._state
        state.elapsed_seconds = before.elapsed_seconds + self._clock() - self._began
        state.data_wait_seconds = before.data_wait_seconds + trainer.data_wait_seconds
        state.evaluation_seconds = before.evaluation_seconds + self._validation.seconds
        state.start_seconds = before.start_seconds + self._stages.total

    def _finish(self, trainer: Trainer) -> int:
        """Save what the policy promises, validate, write the result; the exit status."""
        ended = self._state.step == self._total and self._goes_on
        self._note_seconds(trainer)
        saved = not self._evaluations.sound or self._saving.save_last(self._state)
        validation = self._evaluations.whole(self._state) if ended else None
        status = "failed" if self._faults.fault else "complete" if validation else "interrupted"
        written = self._recording.close()
        self._note_seconds(trainer)
        result = {
            "status": status,
            "signal": self._interruption.number or None,
            "fault": self._faults.fault,
            "validation": validation,
            **build_result(trainer, self._cache, self._state),
            "seconds_this_session": self._clock() - self._began,
            "promise": self._watch.outcome(trainer.updates - self._start, self._validation.targets, self._took()),
            "start_seconds": self._stages.seconds,
            "entry_to_first_update_seconds": self._stages.total if "first_update" in self._stages.seconds else None,
        }
        self._ended = self._write_result(result)
        if not self._ended or not written:
            raise TinyllmRayError(f"{self._out}: the result could not be written whole; free space and --resume")
        if not saved:
            raise TinyllmRayError(f"{self._out}: the last checkpoint could not be written; train.log says why")
        if status == "interrupted":
            return self._interruption.exit_status if self._interruption.number else EXIT_DONE
        return EXIT_NO_RESULT if status == "failed" else EXIT_DONE

    def _took(self) -> Phases:
        """Seconds of this session so far."""
        state, before = self._state, self._before
        return Phases(
            start=self._stages.total,
            training=state.training_seconds - before.training_seconds + self._proof_seconds,
            evaluation=self._validation.seconds,
            checkpoints=state.checkpoint_seconds - before.checkpoint_seconds,
            total=self._clock() - self._began,
        )

    def _write_result(self, result: dict[str, Any]) -> bool:
        return self._recording.write_json(RESULT, result)
