"""Staging on a real Slurm of two nodes: copies on both, used by Ray and the command, and gone with the job."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_slurm import LocalSlurm, booted

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

LOOK = """
import json, os, socket, sys
import ray
import which_copy
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.data.prepare import default_cache
from tinyllm_ray.data.staged import staged_copy
from tinyllm_ray.train.compile_cache import compile_cache_folder
from pathlib import Path

def look():
    import which_copy
    from tinyllm_ray.data.staged import staged_copy
    compiled = Path(compile_cache_folder(), "kernel")
    known = compiled.exists()
    compiled.write_text("code")
    return {
        "host": socket.gethostname(),
        "package": which_copy.__file__,
        "prefix": sys.prefix,
        "tokens": str(staged_copy(open_cache(default_cache())).folder),
        "compiled": str(compiled),
        "known": known,
    }

ray.init(log_to_driver=False, logging_level="ERROR")
print("DRIVER " + json.dumps(look()))
for node in ray.nodes():
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    print("NODE " + json.dumps(ray.get(ray.remote(num_cpus=1, scheduling_strategy=where)(look).remote())))
"""


@pytest.fixture(scope="module")
def shared_slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=4, gpus=0, cache=built_root) as local:
        # Packages of its own are one small module; torch and Ray come from this Python's, by a .pth file.
        environment = local.work / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        (packages / "which_copy.py").write_text("")
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        (local.work / "site.yaml").write_text(f"python: {environment}/bin/python\npacks: {local.work}/packs\n")
        (local.work / "look.py").write_text(LOOK)
        yield local


@pytest.fixture
def slurm(shared_slurm: LocalSlurm) -> LocalSlurm:
    return shared_slurm.for_one_test()


def staged_job(slurm: LocalSlurm, *options: object) -> tuple[int, str, dict[str, Any], list[dict[str, Any]]]:
    """A job over both nodes: its number, its log, what its driver saw and what each node did."""
    size = ("--nodes", 2, "--cpus-per-node", 2, "--time", 10, "--site", "site.yaml", *options)
    job = slurm.submit(*size, "--", "look.py")
    state, log = slurm.ended(job), slurm.said(job)
    assert state == "COMPLETED", log
    seen = [line.split(" ", 1) for line in log.splitlines() if line.startswith(("DRIVER ", "NODE "))]
    (driver,) = [json.loads(text) for kind, text in seen if kind == "DRIVER"]
    return job, log, driver, [json.loads(text) for kind, text in seen if kind == "NODE"]


def test_both_nodes_use_copies_of_their_own_and_the_next_job_takes_the_same_packs(slurm: LocalSlurm) -> None:
    job, log, driver, nodes = staged_job(slurm, "--stage")
    folder = f"/tmp/tr0-{job}/stage"
    assert {node["host"] for node in nodes} == {"n1", "n2"}
    for seen in [driver, *nodes]:
        assert seen["prefix"] == f"{folder}/environment"
        assert seen["package"].startswith(f"{folder}/environment/")
        assert seen["compiled"].startswith(f"{folder}/compiled/")
    assert "on 2 of 2 nodes in" in log
    slurm.wait(lambda: not any(f"tr0-{job}" in slurm.files(node) for node in ("n1", "n2")))
    packs = {path: path.stat().st_ino for path in (slurm.work / "packs").rglob("*.tar")}
    assert packs
    _, _, driver, _ = staged_job(slurm, "--stage")
    assert packs.items() <= {path: path.stat().st_ino for path in (slurm.work / "packs").rglob("*.tar")}.items()
    assert driver["known"], "what the first job compiled is there for the second one"


def test_a_damaged_pack_is_told_and_the_shared_packages_are_used(slurm: LocalSlurm) -> None:
    staged_job(slurm, "--stage")
    (part,) = (slurm.work / "packs").glob("environment-*/part-0.tar")
    data = bytearray(part.read_bytes())
    data[520] ^= 1
    part.write_bytes(data)
    job, log, driver, nodes = staged_job(slurm, "--stage")
    for name in ("n1", "n2"):
        assert f"stage: {name} reads the shared environment: " in log
    assert {seen["prefix"] for seen in [driver, *nodes]} == {str(slurm.work / "venv")}
    assert all(seen["compiled"].startswith(f"/tmp/tr0-{job}/stage/") for seen in nodes)
