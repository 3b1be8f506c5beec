"""Several compiled candidates at once over one cold compile cache, for a user that the system knows nothing of."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinyllm_ray
from tinyllm_ray.config import Config
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.train.compile_cache import FOLDER_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

MakeConfig = Callable[..., Config]

TOGETHER = 3
AS_NOBODY = [
    "setpriv",
    *("--reuid=12345", "--regid=12345", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""A user without an entry in the system's list, as in many containers; Python may lie where only root may read."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Everybody may go there, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def test_they_share_what_is_compiled_and_learn_the_same(tiny: MakeConfig, folder: Path) -> None:
    config = tiny(execution={"update": "compiled"})
    environment = {name: value for name, value in os.environ.items() if name not in {"HOME", "USER", "LOGNAME"}}
    root = Path(tinyllm_ray.__file__).parents[1]
    environment |= {FOLDER_VARIABLE: str(folder / "cache"), "PYTHONPATH": str(root), "TMPDIR": str(folder)}
    prefix = AS_NOBODY if os.getuid() == 0 and shutil.which("setpriv") else []

    def begin(name: str) -> "subprocess.Popen[str]":
        program = str(Path(__file__).parent / "one_candidate.py")
        command = [*prefix, sys.executable, program, json.dumps(config.model_dump(mode="json")), str(folder / name)]
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)

    def end(process: "subprocess.Popen[str]", name: str) -> TrialRecord:
        said = process.communicate()[0]
        record = TrialRecord.model_validate_json(said)
        log = folder / name / "c001.log"
        assert record.fate is Fate.COMPLETE, f"{record.reason}\n{log.read_text()}"
        return record

    names = [f"logs-{number}" for number in range(TOGETHER)]
    records = [end(process, name) for process, name in [(begin(name), name) for name in names]]
    compiled = set((folder / "cache").rglob("*.so"))
    assert compiled
    records.append(end(begin("later"), "later"))
    assert set((folder / "cache").rglob("*.so")) == compiled, "the later one found all it needs"
    (cache,) = {record.compile_cache for record in records}
    assert Path(str(cache)).is_relative_to(folder / "cache")
    learned = [[(window.loss, window.grad_norm) for window in record.windows] for record in records]
    assert all(one == learned[0] for one in learned)
    assert all(record.seconds.compile for record in records)
