"""A run's evaluations: the fixed subset at each epoch's end, the whole validation split at the run's."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tinyllm_ray.clock import Clock
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache, Tokens
from tinyllm_ray.data.loader import subset_batches, validation_batches
from tinyllm_ray.train.evaluate import Evaluator
from tinyllm_ray.train.interruption import Interrupted, Interruption
from tinyllm_ray.train.progress import Evaluating, OnProgress
from tinyllm_ray.train.recipe import epoch_ends
from tinyllm_ray.train.trainer import Trainer


class Evaluated(NamedTuple):
    """What an evaluation found."""

    loss: float
    """Nats a target; may not be finite."""
    targets: int
    seconds: float


class Validation:
    """Evaluates what `trainer` trains, as often as wanted; a signal ends an evaluation on its way.

    That is the model, the average of models that are mixed, or each model of a pack whose models are not.

    `seconds` and `targets` are of all evaluations, `expected_targets` what those of the whole run come to; `compiled`
    says whether their loss is compiled, which depends on how many targets each model has of them.
    """

    def __init__(
        self,
        trainer: Trainer,
        cache: TokenCache,
        interruption: Interruption,
        on_progress: OnProgress,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.seconds, self.targets = 0.0, 0
        self._config, self._cache = trainer.config, cache
        self._interruption, self._on_progress, self._clock = interruption, on_progress, clock
        tokens = cache.tokens("validation")
        self._subset_targets = min(self._config.evaluation.subset_blocks * self._config.model.context, tokens)
        left = sum(step > trainer.updates for step in epoch_ends(self._config))
        expected_targets = left * self._subset_targets + tokens  # of each model
        self._trainer = trainer
        self._evaluators = [
            Evaluator(model, self._config, trainer.device, expected_targets) for model in trainer.evaluation_models()
        ]
        self.expected_targets = expected_targets * len(self._evaluators)
        self.compiled = self._evaluators[0].compiled
        self._subset: list[Tokens] | None = None

    def subset(self) -> list[Evaluated] | None:
        """Loss over the subset, of each model; None where a signal came."""
        if (
            self._subset is None
        ):  # its rows lie apart: 60 ms for 1,024 of them, where an evaluation takes 155 on an H200
            self._subset = list(_subset_batches(self._config, self._cache, self._evaluators[0].rows))
        batches = self._subset
        return self._evaluate("subset", lambda: batches, self._subset_targets)

    def whole(self) -> list[Evaluated] | None:
        """Loss over the whole split, of each model; None where a signal came."""

        def batches() -> Iterable[Tokens]:
            return validation_batches(self._cache, self._config.model.context, self._evaluators[0].rows)

        return self._evaluate("validation", batches, self._cache.tokens("validation") - 1)

    def _evaluate(
        self, name: str, batches: Callable[[], Iterable[Tokens]], expected_targets: int
    ) -> list[Evaluated] | None:
        began = self._clock()
        try:
            with self._interruption.raising():
                self._trainer.evaluation_models()  # brings an average up to date
                found: list[Evaluated] = []
                for evaluator in self._evaluators:
                    before = self._clock()
                    shown = self._shown(name, batches(), len(found), expected_targets)
                    loss, targets = evaluator.evaluate(shown)
                    self.targets += targets
                    found.append(Evaluated(loss, targets, self._clock() - before))
                return found
        except Interrupted:
            return None
        finally:
            self.seconds += self._clock() - began

    def _shown(self, name: str, batches: Iterable[Tokens], models: int, expected_targets: int) -> Iterator[Tokens]:
        done = models * expected_targets
        for batch in batches:
            yield batch
            done += batch[:, 1:].size
            self._on_progress(Evaluating(name, done, expected_targets * len(self._evaluators)))


def _subset_batches(config: Config, cache: TokenCache, rows: int) -> Iterator[Tokens]:
    chosen = config.evaluation
    return subset_batches(cache, config.model.context, rows, blocks=chosen.subset_blocks, seed=chosen.subset_seed)
