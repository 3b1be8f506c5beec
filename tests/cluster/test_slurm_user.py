"""A job of a user who is not root, where Ray's usual folders are root's, on a real Slurm."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from local_slurm import ROOT, LocalSlurm, booted

USER = 65534
STRANGER = 65533


def as_user(number: int) -> list[str]:
    return ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]


def closed_to_the_user() -> str:
    """A file without which no job runs, and which the user cannot read; empty where there is none."""
    for path in (os.path.realpath(sys.executable), ray.__file__, str(ROOT / "tinyllm_ray" / "__init__.py")):
        if subprocess.run([*as_user(USER), "test", "-r", path], check=False).returncode:
            return path
    return ""


pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

LOOK = """
import json, os, time
from pathlib import Path
import ray

ray.init(log_to_driver=False, logging_level="ERROR")
folder = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
seen = {
    "nodes": len(ray.nodes()),
    "users": [os.getuid(), ray.get(ray.remote(lambda: os.getuid()).remote())],
    "folder": str(folder),
    "session": ray._private.worker._global_node.get_session_dir_path(),
}
Path("seen.json").write_text(json.dumps(seen))
while not Path("go").exists():
    time.sleep(0.2)
"""


@pytest.fixture
def slurm(built_root: Path) -> Iterator[LocalSlurm]:
    if path := closed_to_the_user():
        pytest.skip(f"needs a Python and a clone that every user may read: {path} is closed to others")
    with booted(nodes=2, cpus=2, gpus=0, cache=built_root) as local:
        local.folder.chmod(0o711)
        local.work.chmod(0o777)
        (local.work / "look.py").write_text(LOOK)
        yield local


def test_roots_folders_are_in_nobodys_way_and_a_jobs_own_one_is_closed_to_all_others(slurm: LocalSlurm) -> None:
    for node in ("n1", "n2"):
        slurm.on(node, "mkdir", "--mode=755", "/tmp/ray", "/tmp/_ray_lockfiles")
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 10, "--", "look.py", by=as_user(USER))
    slurm.wait((slurm.work / "seen.json").exists, job)
    seen = json.loads((slurm.work / "seen.json").read_text())
    folder = f"/tmp/tr{USER}-{job}"
    assert seen["nodes"] == 2
    assert seen["users"] == [USER, USER]
    assert seen["folder"] == folder
    assert seen["session"].startswith(f"{folder}/")
    for node in ("n1", "n2"):
        assert slurm.on(node, *as_user(USER), "cat", f"{folder}/token")
        for stranger, path in ((STRANGER, "token"), (STRANGER, "r"), (STRANGER, "")):
            with pytest.raises(subprocess.CalledProcessError):
                slurm.on(node, *as_user(stranger), "ls", f"{folder}/{path}")
    (slurm.work / "go").touch()
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    slurm.wait(lambda: slurm.is_empty("n1", "n2"))
    assert all(Path(folder).name not in slurm.files(node) for node in ("n1", "n2"))
