"""How a candidate's throughput is measured: warm-up and windows, by count or by time and need."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tinyllm_ray.sections import Integer, Number


class Protocol(BaseModel):
    """How a throughput was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    version: Literal[2, "adaptive"] = 2
    """2: the reference's, by count. adaptive: windows by time, their number by need, the warm-up until it is steady."""
    data_mode: Literal["real", "synthetic"] = "real"
    """real: cache, loader and transfers; synthetic: one batch that stays on the device."""
    warmup_updates: Integer = Field(default=20, ge=1)
    """Updates before the first window, the first of which includes compilation; where adaptive, at most so many."""
    windows: Integer = Field(default=3, ge=1)
    """Where adaptive, the fewest of a candidate that is not dominated."""
    updates_per_window: Integer = Field(default=100, ge=1)
    """Where adaptive, as many as `window_seconds` takes instead; windows by need end once they took as long together
    as by count."""
    window_seconds: Number = Field(default=0.5, gt=0)
    """Adaptive only: how long a window lasts at least."""
    most_windows: Integer = Field(default=12, ge=1)
    """Adaptive only; `least_seconds` may take more."""
    least_seconds: Number = Field(default=0.0, ge=0)
    """Adaptive only: windows go on until they last this long together, as under the load of a training."""
    least_updates: Integer = Field(default=0, ge=0)
    """Adaptive only: windows go on until they have so many updates together; not for a dominated one."""

    @property
    def counted_updates(self) -> int:
        """Of all windows by count."""
        return self.windows * self.updates_per_window

    def by_need(self, least_updates: int) -> "Protocol":
        """The same, adaptive, with `least_updates` where windows by count have as many."""
        least = min(least_updates, self.counted_updates)
        return self.model_copy(update={"version": "adaptive", "least_updates": least})

    def counted_seconds(self, seconds_per_update: float) -> float:
        """Seconds of its windows by count, of a candidate with such updates."""
        return self.counted_updates * seconds_per_update

    def seconds_of(self, windows: float, seconds_per_update: float) -> float:
        """Seconds of so many adaptive windows. A window ends with the update that fills it."""
        window = self.window_seconds + seconds_per_update
        least = max(self.least_seconds, self.least_updates * seconds_per_update)
        return max(windows * window, least + window if least else 0.0)

    def longest_seconds(self, seconds_per_update: float) -> float:
        """Seconds of windows that a candidate with such updates takes at most, for planning."""
        counted = self.counted_seconds(seconds_per_update)
        if self.version == 2:
            return counted
        window = self.window_seconds + seconds_per_update
        by_need = min(self.most_windows * window, counted + window)
        return max(self.seconds_of(self.windows, seconds_per_update), by_need)
