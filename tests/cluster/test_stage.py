"""Staging on a node and in the launcher: what is used where, what a fault costs, what is kept for the next job."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tinyllm_ray.cluster import node_folder, stage_contents, stage_job
from tinyllm_ray.cluster.__main__ import main
from tinyllm_ray.cluster.node_folder import NodeFolder, claim, clear_left_behind, job_folder
from tinyllm_ray.cluster.nodes import Share
from tinyllm_ray.cluster.stage import unpack_here
from tinyllm_ray.cluster.stage_contents import collect_compiled, make_packs, pack_tokens, tokens_of
from tinyllm_ray.cluster.stage_files import entries
from tinyllm_ray.cluster.stage_job import Staging, unpack_step
from tinyllm_ray.cluster.stage_pack import key_of, make_pack, newest, read_manifest
from tinyllm_ray.cluster.stage_place import stage_folder, staged_python, staged_variables, whole
from tinyllm_ray.errors import ConfigError

JOB = 17


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    return tmp_path / "packs"


@pytest.fixture
def made(tmp_path: Path, packs: Path) -> dict[str, str]:
    """Packs of a package `hello`, of tokens, and of compiled code of /old/place."""
    trees = {
        "environment": {
            "hello/__init__.py": "WHO = 'staged'",
            "hello-1.dist-info/METADATA": "Name: hello\nVersion: 1\n",
        },
        "tokens": {"abc/manifest.json": "{}"},
        "compiled": {
            "f00/triton/K/__grp__k.json": json.dumps({"child_paths": {"k.cubin": "/old/place/f00/triton/K/k.cubin"}}),
            "f00/triton/K/k.cubin": "code",
        },
    }
    found = {}
    for name, files in trees.items():
        for path, text in files.items():
            place = tmp_path / "trees" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        listed = entries(tmp_path / "trees" / name)
        facts = {"root": "/old/place"} if name == "compiled" else {}
        found[name] = str(make_pack(packs, name, key_of(listed), listed, **facts))
    return found


def folder_of(scratch: Path) -> Path:
    return stage_folder(job_folder(str(scratch), os.getuid(), JOB), os.getuid(), JOB, {})


def damage(pack: str) -> None:
    part = Path(pack) / "part-0.tar"
    data = bytearray(part.read_bytes())
    data[520] ^= 1
    part.write_bytes(data)


def test_a_node_runs_with_what_is_staged(made: dict[str, str], tmp_path: Path) -> None:
    said = unpack_here(made, JOB, str(tmp_path))
    assert (set(said["whole"]), said["problems"]) == (set(made), {})
    folder = folder_of(tmp_path)
    variables = staged_variables(folder)
    code = (
        "import hello, importlib.metadata as m, sys, json; "
        "print(json.dumps([hello.WHO, m.version('hello'), sys.prefix, sys.base_prefix]))"
    )
    done = subprocess.run([staged_python(folder), "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["staged", "1", str(folder / "environment"), sys.base_prefix]
    assert variables["TINYLLM_RAY_STAGED_TOKENS"] == f"{folder}/tokens"
    assert variables["TINYLLM_RAY_COMPILE_CACHE"] == f"{folder}/compiled"
    assert folder.parent.stat().st_mode & 0o077 == 0, "what is compiled is loaded as code"


def test_triton_finds_a_kernels_files_where_they_are_now(made: dict[str, str], tmp_path: Path) -> None:
    unpack_here(made, JOB, str(tmp_path))
    group = folder_of(tmp_path) / "compiled/f00/triton/K/__grp__k.json"
    (path,) = json.loads(group.read_text())["child_paths"].values()
    assert Path(path).read_text() == "code"


@pytest.mark.parametrize("name", ["environment", "tokens", "compiled"])
def test_a_damaged_pack_costs_its_own_part_only(made: dict[str, str], tmp_path: Path, name: str) -> None:
    damage(made[name])
    said = unpack_here(made, JOB, str(tmp_path))
    assert list(said["problems"]) == [name]
    assert "part-0.tar" in said["problems"][name]
    folder = folder_of(tmp_path)
    assert whole(folder) == set(made) - {name} | {"compiled"}, "an empty place for compiled code is one"
    if name == "environment":
        assert staged_python(folder) == sys.executable
        assert not (folder / "environment").exists()
    if name == "tokens":
        assert "TINYLLM_RAY_STAGED_TOKENS" not in staged_variables(folder)


def test_nothing_staged_is_the_shared_python_and_no_variables(tmp_path: Path) -> None:
    assert staged_python(tmp_path) == sys.executable
    assert staged_variables(tmp_path) == {}
    (tmp_path / "staged.json").write_text('{"whole"')
    assert whole(tmp_path) == set()


def test_a_requeued_job_starts_over_and_a_foreign_folder_is_refused(made: dict[str, str], tmp_path: Path) -> None:
    unpack_here(made, JOB, str(tmp_path))
    (folder_of(tmp_path) / "tokens" / "left").write_text("")
    unpack_here({"tokens": made["tokens"]}, JOB, str(tmp_path))
    assert whole(folder_of(tmp_path)) == {"tokens", "compiled"}
    assert not (folder_of(tmp_path) / "tokens" / "left").exists()
    lock = claim(folder_of(tmp_path).parent)
    with pytest.raises(ConfigError, match="in use by another cluster of this job"):
        unpack_here(made, JOB, str(tmp_path))
    os.close(lock)


def test_two_nodes_unpack_at_once(made: dict[str, str], tmp_path: Path) -> None:
    nodes = []
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        told = json.dumps({"packs": made, "job": JOB, "scratch": str(tmp_path / node)})
        command = [sys.executable, "-m", "tinyllm_ray.cluster.stage", "unpack", told]
        environment = os.environ | {"SLURMD_NODENAME": node}
        nodes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [json.loads(node.communicate()[0]) for node in nodes]
    assert [(answer["node"], answer["problems"]) for answer in said] == [("n1", {}), ("n2", {})]
    assert whole(folder_of(tmp_path / "n1")) == whole(folder_of(tmp_path / "n2")) == set(made)


def test_slurms_own_folder_for_the_job_goes_before_the_scratch(tmp_path: Path) -> None:
    assert stage_folder(Path("/tmp/tr0-17"), 0, 17, {"SLURM_TMPDIR": str(tmp_path)}) == tmp_path / "stage-0-17"
    assert stage_folder(Path("/tmp/tr0-17"), 0, 17, {"SLURM_TMPDIR": "/nowhere"}) == Path("/tmp/tr0-17/stage")
    assert stage_folder(Path("/tmp/tr0-17"), 0, 17, {}) == Path("/tmp/tr0-17/stage")


def test_a_nodes_step_keeps_what_is_staged_and_removes_it_at_its_end(
    made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_folder, "end_descendants", lambda *limits: [])
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    unpack_here(made, JOB, str(tmp_path))
    (folder_of(tmp_path).parent / "token").write_text("of the run before")
    with NodeFolder(str(tmp_path), JOB, staged=True) as own:
        assert own.stage == folder_of(tmp_path)
        assert whole(own.stage) == set(made)
        assert not (own.path / "token").exists()
    assert not own.path.exists()


def test_slurms_own_folder_is_cleared_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_folder, "end_descendants", lambda *limits: [])
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "local"))
    (tmp_path / "local" / f"stage-{os.getuid()}-{JOB}").mkdir()
    with NodeFolder(str(tmp_path), JOB, staged=True):
        pass
    assert list((tmp_path / "local").iterdir()) == []


def test_another_jobs_staged_files_wait_for_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = job_folder(str(tmp_path), os.getuid(), 3)
    (other / "stage").mkdir(parents=True, mode=0o700)
    other.chmod(0o700)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 600)
    clear_left_behind(job_folder(str(tmp_path), os.getuid(), 9))
    assert other.exists()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    clear_left_behind(job_folder(str(tmp_path), os.getuid(), 9))
    assert not other.exists()


def test_the_tokens_in_use_are_those_the_command_will_open(
    tmp_path: Path, built_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLLM_RAY_CACHE", str(built_root))
    (default,) = built_root.glob("sotu-*")
    assert tokens_of(["tune", "--budget", "45m", "--out", "x"]) == default
    assert tokens_of(["train", "--config", "nano", "--set", "data.cache=/caches/c4"]) == Path("/caches/c4")
    (tmp_path / "mine.yaml").write_text("preset: nano\ndata: {cache: /caches/books}\n")
    assert tokens_of(["tune", "--budget=1m", "--config", str(tmp_path / "mine.yaml"), "--resume"]) == Path(
        "/caches/books"
    )
    assert tokens_of(["data", "prepare"]) is None
    assert tokens_of(["mine.py"]) is None


def test_tokens_over_the_limit_are_read_where_they_lie(
    packs: Path, built_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLLM_RAY_CACHE", str(built_root))
    pack = pack_tokens(packs, ["tune"])
    assert isinstance(pack, Path)
    identity = read_manifest(pack)["identity"]
    assert {entry.split("/")[0] for entry in tar_names(pack)} == {identity}
    monkeypatch.setattr(stage_contents, "MOST_BYTES", 1000)
    assert "it is read where it lies" in str(pack_tokens(packs, ["tune"]))


def tar_names(pack: Path) -> list[str]:
    import tarfile

    names = []
    for part in sorted(pack.glob("*.tar")):
        with tarfile.open(part) as tar:
            names += tar.getnames()
    return names


def test_what_cannot_be_packed_is_noted_and_the_rest_is_packed(
    packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path / "compile"))
    found = make_packs(packs, ["tune", "--config", "nowhere.yaml"], with_environment=False)
    assert found.folders == {}
    assert len(found.notes) == 1
    assert found.notes[0].startswith("tokens: ConfigError")


def test_what_was_compiled_is_kept_without_locks_and_bytecode(packs: Path, tmp_path: Path) -> None:
    root = tmp_path / "compiled"
    for name in ("f00/inductor/a.py", "f00/inductor/a.lock", "bytecode/x.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    pack = collect_compiled(packs, root)
    assert isinstance(pack, Path)
    assert tar_names(pack) == ["f00/inductor/a.py"]
    assert read_manifest(pack)["root"] == str(root)
    assert newest(packs, "compiled") == pack
    assert collect_compiled(packs, tmp_path / "nowhere") == ""


SRUN = """#!/bin/sh
echo "$@" >> {log}
while [ "${{1#--}}" != "$1" ]; do shift; done
for node in {nodes}; do SLURMD_NODENAME=$node "$@"; done
"""
SHARES = [Share("n1", 4, 1, 2000), Share("n2", 2, 1, 1000)]


def staging(tmp_path: Path, packs: Path, received: list[int], **changes: Any) -> Staging:
    fields: dict[str, Any] = {
        "wanted": True,
        "python": [sys.executable],
        "packs": str(packs),
        "in_container": True,
        "job": JOB,
        "scratch": str(tmp_path),
        "received": received,
    }
    return Staging(**(fields | changes))


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_root: Path) -> Path:
    """An `srun` that runs its command for n1 and for n2; its own command lines are in the file."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "srun"
    script.write_text(SRUN.format(log=tmp_path / "srun.log", nodes="n1 n2"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("TINYLLM_RAY_CACHE", str(built_root))
    monkeypatch.setenv("TINYLLM_RAY_COMPILE_CACHE", str(tmp_path / "compile"))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    return tmp_path / "srun.log"


def test_a_job_stages_in_one_step_and_the_next_one_takes_the_packs_that_are_there(
    tmp_path: Path, packs: Path, srun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = staging(tmp_path, packs, [])
    assert job.stage(["tune", "--budget", "1m"], SHARES, 60.0)
    (step,) = srun.read_text().splitlines()
    assert step.startswith(f"{' '.join(unpack_step(SHARES)[1:])} {sys.executable} -m tinyllm_ray.cluster.stage unpack")
    assert "--nodelist=n1,n2" in step
    assert {"--cpus-per-task=2", "--mem=1000M", "--gres=none"} <= set(step.split())
    assert job.variables()["TINYLLM_RAY_STAGED_TOKENS"] == f"{job.folder}/tokens"
    assert job.driver_python == [sys.executable], "packages are in the container's image"
    said = capsys.readouterr().out
    assert "stage: packs of tokens are there after" in said
    assert "GiB on 2 of 2 nodes in" in said
    before = {path: path.stat().st_ino for path in packs.rglob("*.tar")}
    assert staging(tmp_path, packs, []).stage(["tune", "--budget", "1m"], SHARES, 60.0)
    assert {path: path.stat().st_ino for path in packs.rglob("*.tar")} == before
    (job.folder / "compiled" / "f00").mkdir()
    (job.folder / "compiled" / "f00" / "kernel").write_text("code")
    job.collect()
    assert tar_names(newest(packs, "compiled") or Path()) == ["f00/kernel"]


def test_a_node_that_does_not_answer_or_has_a_damaged_pack_is_named(
    tmp_path: Path, packs: Path, srun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staging(tmp_path, packs, []).stage(["tune"], SHARES, 60.0)
    (pack,) = packs.glob("tokens-*")
    damage(str(pack))
    (tmp_path / "bin" / "srun").write_text(SRUN.format(log=srun, nodes="n1"))
    capsys.readouterr()
    assert staging(tmp_path, packs, []).stage(["tune"], SHARES, 60.0)
    error = capsys.readouterr().err
    assert "stage: n1 reads the shared tokens: " in error
    assert "its checksum is another one" in error or "part-0.tar" in error
    assert "stage: n2 did not answer and read what is shared" in error


def test_a_signal_or_a_step_that_hangs_ends_the_staging_and_not_the_job(
    tmp_path: Path, packs: Path, srun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not staging(tmp_path, packs, [15]).stage(["tune"], SHARES, 60.0)
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\nexec sleep 600\n")
    assert not staging(tmp_path, packs, []).stage(["tune"], SHARES, 0.1)
    said = capsys.readouterr().err
    assert "pack is given up" in said
    assert "unpack is given up" in said
    assert "n1, n2 did not answer" in said


def test_a_job_that_does_not_stage_is_as_ever(tmp_path: Path, packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_job.subprocess, "Popen", lambda *_, **__: pytest.fail("something is run"))
    job = staging(tmp_path, packs, [], wanted=False)
    assert not job.stage(["tune"], SHARES, 60.0)
    job.collect()
    assert job.variables() == {}
    assert job.driver_python == [sys.executable]


def test_the_script_tells_the_launcher_to_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.yaml").write_text("packs: /project/my packs\n")
    site = ["submit", "--site", str(tmp_path / "site.yaml"), "--dry-run"]
    assert main([*site, "--stage", "--", "tune", "--budget", "45m"]) == 0
    assert "options=('--packs=/project/my packs' --stage)" in capsys.readouterr().out.splitlines()
    assert main([*site, "--", "tune", "--budget", "45m"]) == 0
    assert "stage" not in capsys.readouterr().out


def test_the_launcher_and_a_nodes_step_import_nothing_slow() -> None:
    code = (
        "import sys, tinyllm_ray.cluster.launch, tinyllm_ray.cluster.node, tinyllm_ray.cluster.stage; "
        "print([m for m in ('torch', 'ray', 'numpy', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
