"""A checkpoint's manifest: which files belong to it, and how it is told that they are as they were written."""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from tinyllm_ray.config import identity
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.parts import WORKERS, parts

WEIGHTS: Final = "model.safetensors"
TRAINING: Final = "training.pt"
MANIFEST: Final = "checkpoint.json"

FileName = Annotated[str, StringConstraints(pattern=rf"^({WORKERS}/\d{{2,}}/)?(model\.safetensors|training\.pt)$")]
"""A file's path in the checkpoint's folder."""


class DamagedError(ConfigError):
    """A checkpoint is not what was written; the message names the file and what is wrong with it."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Stored):
    """A file as it was written."""

    bytes: int
    sha256: str


class Source(_Stored):
    """Which source of this package wrote the checkpoint; revision and state are git's, None outside a checkout."""

    sha256: str
    revision: str | None
    dirty: bool | None


class Manifest(_Stored):
    """The content of `checkpoint.json`."""

    schema_version: Literal[1] = 1
    step: int
    """Updates behind the weights."""
    config: dict[str, Any]
    recipe_identity: str
    cache_identity: str
    source: Source
    torch: str
    files: dict[FileName, FileEntry]
    digest: str = ""
    """SHA-256 over everything else in this file."""

    @property
    def workers(self) -> int:
        """How many models are packed in the checkpoint; 0 where it is of a lone one."""
        return sum(name.startswith(f"{WORKERS}/") and name.endswith(WEIGHTS) for name in self.files)

    def sealed(self) -> "Manifest":
        return self.model_copy(update={"digest": _digest(self.model_dump(mode="json"))})


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file `path`. Raises DamagedError where it is not as it was written."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: is damaged: no JSON ({error})") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version != 1:
        raise DamagedError(f"{path}: has schema_version {version}, this version reads 1")
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path}: is damaged: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    if manifest.digest != _digest(values) or not _is_whole(manifest):
        raise DamagedError(f"{path}: is damaged: its content is another than what was written")
    return manifest


def _is_whole(manifest: Manifest) -> bool:
    """Whether it names files for every model, and no others: weights, and for all models or none training state."""
    names = manifest.files.keys()
    kinds = (WEIGHTS, TRAINING) if TRAINING in names else (WEIGHTS,)
    models = {part.folder + kind for part in parts(manifest.workers) for kind in kinds}
    return models <= names <= {*models, *kinds}


def _digest(values: dict[str, Any]) -> str:
    return identity({key: value for key, value in values.items() if key != "digest"})
