"""What a candidate's process is told: written by the study's process, which needs no torch for it."""

from typing import Any, Literal

from pydantic import BaseModel

from tinyllm_ray.measure.need import Bar
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Purpose


class TrialRequest(BaseModel):
    """Everything a candidate's process is told."""

    study: str
    candidate: str
    label: str
    """Name for people, like `mb32 compiled default auto t8`."""
    config: dict[str, Any]
    protocol: Protocol
    cache: str | None
    """Folder of the token cache; None in data mode `synthetic`."""
    cache_identity: str | None
    range_server: str | None = None
    """Address of the node's server of token ranges; None reads the cache's files."""
    configuration: str | None = None
    """Path of the candidate's configuration file, relative to the study's folder."""
    compiled: str | None = None
    """Path of the file that what the candidate compiles is kept in; None keeps it nowhere."""
    device_kind: Literal["cuda", "cpu"] | None = None
    """What the study's figures are of; None takes what there is."""
    parity: bool = False
    """Whether one update is compared with the float32 reference, which takes a second model's memory."""
    limit_seconds: float
    """Seconds from the request after which the process is ended."""
    purpose: Purpose = "search"
    round: int | None = None
    """Of a verification."""
    bar: Bar = Bar()
    """What an adaptive protocol stops the candidate for."""
