"""What a run makes of its evaluations: records, bests, models that stop, and the fault where nothing is finite."""

import math
from typing import Any

from tinyllm_ray.train.faults import Faults, note_stop
from tinyllm_ray.train.recording import Recording
from tinyllm_ray.train.result import describe_validation, note_bests
from tinyllm_ray.train.state import RunState
from tinyllm_ray.train.validation import Validation

_AFTER_UPDATE = "the validation subset, with the weights that the update left"


class JudgedEvaluations:
    """The evaluations of one session, which write into its state, its folder and its faults."""

    def __init__(self, validation: Validation, recording: Recording, faults: Faults) -> None:
        self.sound = True
        """Whether the weights are worth keeping: an update that went non-finite did not touch them."""
        self._validation, self._recording, self._faults = validation, recording, faults

    def subset(self, state: RunState, epochs: int) -> None:
        """The subset, after which so many epochs have ended; nothing where a signal came."""
        found = self._validation.subset()
        if found is None:
            return
        state.evaluated_step, state.epochs = state.step, epochs
        if not any(math.isfinite(each.loss) for each in found):
            # An update's own loss is that of the weights before it, so the last update's harm shows only here.
            self.sound = False
            self._faults.fail(state.step, [each.loss for each in found], _AFTER_UPDATE)
            return
        for model, each in enumerate(found):
            if not math.isfinite(each.loss) and str(model) not in state.stopped:
                state.stopped[str(model)] = state.step
                note_stop(model, state.step, _AFTER_UPDATE)
        self._recording.evaluations(state, "subset", found)
        note_bests(state, [each.loss for each in found])
        self._recording.write_json("best.json", state.best or state.bests)

    def whole(self, state: RunState) -> dict[str, Any] | None:
        """The whole validation split; None where a signal ended it, or the loss is not finite."""
        found = self._validation.whole()
        if found is None:
            return None
        if not any(math.isfinite(each.loss) for each in found):
            self._faults.fail(state.step, [each.loss for each in found], "the validation split")
            return None
        self._recording.evaluations(state, "validation", found)
        return describe_validation(found, state)
