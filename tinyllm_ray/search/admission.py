"""What fits into the seconds that a study has left, verification's kept, and what had to be left out."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tinyllm_ray.search.cost import Prediction


class Admission:
    """Of one ask."""

    def __init__(
        self,
        seconds_left: float,
        reserve: Callable[[Mapping[str, Any]], float],
        baseline: dict[str, Any],
        unanswered: bool = False,
    ) -> None:
        """`reserve` is what is kept for verification, should an execution win; `baseline` is one that may win.

        While nothing has a figure (`unanswered`), a candidate may take the chance that it goes as expected.
        """
        self.seconds_left = seconds_left
        self.left_out: dict[str, tuple[dict[str, Any], Prediction]] = {}
        """Executions, by identity, that would have been measured."""
        self._reserve = reserve
        self._baseline = baseline
        self._unanswered = unanswered

    def fits(self, execution: Mapping[str, Any], prediction: Prediction, verified: bool = True) -> bool:
        """Whether it ends in time, however badly it goes, and where it is to be `verified` that, too."""
        if self._unanswered:
            return prediction.expected_seconds <= self.seconds_left
        return prediction.upper_seconds + (self._reserve(execution) if verified else 0.0) <= self.seconds_left

    def need(self, execution: Mapping[str, Any], prediction: Prediction) -> str:
        """What it needs, for people."""
        left = max(0, math.floor(self.seconds_left))
        if self._unanswered or execution == self._baseline:
            return f"about {math.ceil(prediction.expected_seconds)} s and {left} s are left"
        reserve = math.ceil(self._reserve(self._baseline))
        # More than what is left is not kept of it: then there is nothing yet that could be verified.
        kept = f", {reserve} s of them for verification" if 0 < reserve <= left else ""
        return f"up to {math.ceil(prediction.upper_seconds)} s and {left} s are left{kept}"

    def least(self) -> str:
        """What the cheapest of those that were left out needs."""
        execution, prediction = min(self.left_out.values(), key=lambda one: one[1].upper_seconds)
        return self.need(execution, prediction)
