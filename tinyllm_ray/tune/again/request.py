"""What a rerun and a validation are asked, as plain values that cross to their process."""

from pydantic import BaseModel, ConfigDict


class AgainRequest(BaseModel):
    """What both are asked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    task: str
    budget: str
    """The whole budget as it was given, like `90s`."""
    budget_seconds: float
    """Seconds left when the process starts."""
    total_seconds: float
    """The whole budget in seconds."""
    age_seconds: float
    """Of the budget, used up when the process starts."""
    out: str
    """Folder that the records go to: the study's for a rerun, the validation's own."""
    address: str | None = None
    """A Ray cluster to join."""


class RerunRequest(AgainRequest):
    """One candidate of the study in `out`."""

    candidate: str


class ValidateRequest(AgainRequest):
    """One decision."""

    selected: str
    """Path of the configuration that was selected."""
    by_device: str | None = None
    """The model of GPU to ask about, as Ray names it, on a cluster of several; None is the study's."""
