"""What a study promises of the execution that it selected: the section `tuned` of a selected configuration.

It belongs neither to the recipe nor to the execution: a training does the same with it and without. It counts for the
workload that it names, and says nothing about any other.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, StrictBool

from tinyllm_ray.sections import Integer, Number, Section

Rate = Annotated[Number, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class CompiledFile(Section):
    """Code that the study compiled for this execution."""

    file: Text
    """Relative to the configuration that names it."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    machine: Text
    """Fingerprint of the machines that it runs on, as `measure.environment.machine_fingerprint` makes it."""
    source: Text
    """Identity of the package's source that it was compiled from."""


class Promise(Section):
    """A measured execution, as a training may expect it."""

    study: Text
    candidate: Text
    workload: Text
    """`Config.workload_identity` of what was measured."""
    targets_per_second: Rate
    low: Rate
    high: Rate
    """Where a further process of this execution lies on such a device, with 90%."""
    processes: Integer = Field(gt=0)
    """That the figure comes from."""
    verified: StrictBool
    """Whether the execution was measured again after the search had chosen it."""
    start_seconds: Annotated[Number, Field(ge=0)]
    """From a process's start to the end of its first update, what is compiled being cached."""
    device_kind: Literal["cuda", "cpu"]
    device: Text
    """Its name, like `NVIDIA H200`."""
    versions: dict[str, str]
    """Of torch, triton and the driver, as far as they are there."""
    attention: tuple[str, ...]
    """SDPA backends whose kernels ran."""
    kernel_milliseconds: dict[str, Number]
    """An update's kernel time by category."""
    compiled: CompiledFile | None = None

    def naming(self, name_of: Callable[[str], str]) -> "Promise":
        """The same with another name of the compiled file, made of the one it has."""
        if self.compiled is None:
            return self
        return self.model_copy(
            update={"compiled": self.compiled.model_copy(update={"file": name_of(self.compiled.file)})}
        )
