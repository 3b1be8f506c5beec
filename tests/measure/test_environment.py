"""The environment's probes: each stands alone, none raises, and no secret gets into a record."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinyllm_ray
from tinyllm_ray.measure import environment
from tinyllm_ray.measure.environment import (
    collect_environment,
    devices,
    machine_fingerprint,
    source_identity,
    usable_cores,
)

ROOT = Path(tinyllm_ray.__file__).parents[1]

SMI = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, NVIDIA GH200 120GB, GPU-6a34, 97871, 512, 580.65.06, 31, 71.05, 900.00, 345, [N/A]"
             echo "1, NVIDIA GH200 120GB, GPU-77aa, 97871, 0, 580.65.06, 30, [Unknown Error], 900.00, 345, Disabled";;
topo*) printf 'GPU0\\tX\\n';;
esac
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is searched for commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    machine_fingerprint.cache_clear()
    source_identity.cache_clear()
    return folder


def command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def test_the_environment_is_json_and_names_what_matters() -> None:
    found = collect_environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["python"] == sys.version
    assert found["versions"]["tinyllm_ray"] == tinyllm_ray.__version__
    assert set(found["versions"]) >= {"torch", "triton", "ray", "numpy", "pydantic"}
    assert found["versions"]["pydantic"]
    assert found["cpu"]["model"]
    assert 1 <= found["cpu"]["usable_cores"] <= len(found["cpu"]["affinity"]) <= found["cpu"]["cores"]
    assert found["cpu"]["memory_bytes"] > 2**28


def test_cudnn_is_known_by_its_packages_name_and_no_other_package_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search would open a file of each of hundreds, on a file system that may be slow."""
    for name, version in (("nvidia_cudnn_cu12", "9.10.2.21"), ("other", "1.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(environment, "cuda_version", lambda: "12.8")
    read: list[str] = []
    text = importlib.metadata.PathDistribution.read_text
    monkeypatch.setattr(
        importlib.metadata.PathDistribution,
        "read_text",
        lambda self, name: read.append(str(self._path)) or text(self, name),  # type: ignore[attr-defined,func-returns-value]
    )
    assert environment._cudnn_version() == "9.10.2.21"
    assert {Path(path).name for path in read} == {"nvidia_cudnn_cu12-9.10.2.21.dist-info"}
    monkeypatch.setattr(environment, "cuda_version", lambda: None)
    assert environment._cudnn_version() is None


def test_collecting_imports_no_torch() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from tinyllm_ray.measure.environment import collect_environment, devices, machine_fingerprint\n"
    code += "collect_environment(); devices(); machine_fingerprint()\n"
    code += "print([name for name in ('torch', 'ray', 'triton', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"


def test_a_machine_without_commands_has_no_gpu_and_no_problem(commands: Path) -> None:
    found = collect_environment()
    assert (found["gpus"], found["driver"], found["gpu_topology"]) == (None, None, None)
    assert found["problems"] == {}


def test_the_gpus_by_nvidia_smi(commands: Path) -> None:
    command(commands, "nvidia-smi", SMI)
    found = collect_environment()
    first, second = found["gpus"]
    assert first["name"] == "NVIDIA GH200 120GB"
    assert (first["uuid"], first["total_memory_mib"], first["power_watts"]) == ("GPU-6a34", 97871, 71.05)
    assert (first["mig_mode"], second["power_watts"], second["mig_mode"]) == (None, None, "Disabled")
    assert found["driver"] == "580.65.06"
    assert found["gpu_topology"] == "GPU0\tX"
    assert found["problems"] == {}


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n", "status 9: NVIDIA-SMI has failed"),
        ("#!/bin/sh\necho no driver >&2\nexit 1\n", "status 1: no driver"),
        ("#!/bin/sh\nexec sleep 1000\n", "no answer within"),
        ("#!/nowhere/sh\n", "No such file"),
        ("\x00\x01", "Exec format error"),
    ],
)
def test_a_failing_command_is_named_and_stops_nothing(
    commands: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    monkeypatch.setattr(environment, "_PROBE_SECONDS", 0.5)
    command(commands, "nvidia-smi", script)
    command(commands, "sleep", f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n")
    found = collect_environment()
    assert found["gpus"] is None
    assert problem in found["problems"]["gpus"]
    assert found["cpu"]["usable_cores"] >= 1


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "SLURM_JOB_ID": "17",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_SUBMIT_DIR": "/home/u",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    secret = {
        "SLURM_JWT": "x",
        "SLURM_API_TOKEN": "x",
        "SLURM_db_password": "x",
        "SLURM_SSH_KEY": "x",
        "SLURM_EXPORT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1In0.x",
        "SLURM_CONF_SERVER": "https://user:word@host",
    }
    for name, value in (kept | secret | {"OMP_NUM_THREADS": "3", "HF_TOKEN": "x", "OMP_SECRET": "x"}).items():
        monkeypatch.setenv(name, value)
    found = collect_environment()
    assert found["slurm"].items() >= kept.items()
    assert not found["slurm"].keys() & secret.keys()
    assert found["threads"]["OMP_NUM_THREADS"] == "3"
    assert "HF_TOKEN" not in json.dumps(found)
    assert "OMP_SECRET" not in json.dumps(found)


# Cores


def test_cores_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(environment, "_cgroup_cores", lambda mount, membership: iter(()))
    assert usable_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert usable_cores() == 3
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "64")
    assert usable_cores() == 8
    monkeypatch.setattr(environment, "_cgroup_cores", lambda mount, membership: iter([2.5]))
    assert usable_cores() == 2
    monkeypatch.setattr(environment, "_cgroup_cores", lambda mount, membership: iter([0.5]))
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "max 100000"}, [4.0]),
        ("0::/", {"cpu.max": "200000 100000"}, [2.0]),
        ("0::/", {}, []),
        (
            "4:memory:/m\n1:cpu:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            [3.0],
        ),
        ("1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
        ("3:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, []),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, membership: str, files: dict[str, str], cores: list[float]) -> None:
    (tmp_path / "self").write_text(membership + "\n")
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(environment._cgroup_cores(tmp_path / "mount", tmp_path / "self")) == cores


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(environment._cgroup_cores(tmp_path, tmp_path / "absent")) == []


# Source


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two files that stands in for ours."""
    folder = tmp_path / "checkout" / "tinyllm_ray"
    (folder / "model" / "presets").mkdir(parents=True)
    (folder / "__init__.py").write_text("a = 1\n")
    (folder / "model" / "presets" / "nano.yaml").write_text("a: 1\n")
    monkeypatch.setattr(tinyllm_ray, "__file__", str(folder / "__init__.py"))
    return folder


def source_sha256() -> str:
    source_identity.cache_clear()
    return source_identity().sha256


@pytest.fixture(autouse=True)
def forget_the_source() -> None:
    source_identity.cache_clear()


def test_the_source_is_its_files(package: Path) -> None:
    before = source_sha256()
    assert before == source_sha256()
    for name in ("__pycache__/a.py", "a.pyc", "a.swp", "search_spaces/smoke.yaml"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("x")
    assert source_sha256() == before

    seen = {before}
    for name in ("__init__.py", "model/presets/nano.yaml", "model/new.py"):
        (package / name).write_text("a = 2\n")
        seen.add(source_sha256())
    (package / "model" / "new.py").rename(package / "new.py")
    seen.add(source_sha256())
    assert len(seen) == 5


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@e")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_state_of_a_checkout(package: Path) -> None:
    assert (source_identity().revision, source_identity().dirty) == (None, None)
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "first")
    (package.parent / "notes").write_text("beside the package")
    source_identity.cache_clear()
    assert (source_identity().revision, source_identity().dirty) == (git(package, "rev-parse", "HEAD"), False)
    assert collect_environment()["git"] == {"revision": git(package, "rev-parse", "HEAD"), "dirty": False}
    (package / "new.py").write_text("")
    source_identity.cache_clear()
    assert source_identity().dirty is True


def test_a_package_inside_someone_elses_checkout_has_no_revision(package: Path) -> None:
    git(package.parents[1], "init", "-q")
    assert source_identity().revision is None


def test_a_checkout_that_git_refuses_is_a_problem(package: Path, commands: Path) -> None:
    (package.parent / ".git").mkdir()
    command(commands, "git", "#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
    found = collect_environment()
    assert found["git"] == {"revision": None, "dirty": None}
    assert "dubious ownership" in found["problems"]["git_revision"]


# Fingerprint and devices


def test_the_fingerprint_changes_with_what_compiled_code_depends_on(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> str:
        machine_fingerprint.cache_clear()
        return machine_fingerprint()

    seen = {now()}
    command(commands, "nvidia-smi", SMI)
    seen.add(now())
    command(commands, "nvidia-smi", SMI.replace("580.65.06", "590.1"))
    seen.add(now())
    command(commands, "nvidia-smi", SMI.replace("GH200", "H200"))
    seen.add(now())
    for package in ("torch", "triton"):
        versions = {**environment.installed_versions(), package: "9.9"}
        monkeypatch.setattr(environment, "installed_versions", lambda versions=versions: versions)
        seen.add(now())
    monkeypatch.setattr(environment, "_cpu_model", lambda: "another")
    seen.add(now())
    assert len(seen) == 7
    before = now()
    command(commands, "nvidia-smi", SMI.replace("GH200", "H200").replace("6a34", "0000").replace(", 31,", ", 77,"))
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert now() == before
    assert len(before) == 16
    machine_fingerprint.cache_clear()


def test_the_cpu_is_the_device_where_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (device,) = devices()
    assert (device.kind, device.identifier) == ("cpu", None)
    assert device.name == environment._cpu_model()
    assert collect_environment("cpu")["device"]["kind"] == "cpu"


@pytest.mark.gpu
def test_the_devices_are_those_of_nvidia_smi() -> None:
    import torch

    found = devices()
    assert len(found) == torch.cuda.device_count()
    known = {gpu["uuid"] for gpu in collect_environment()["gpus"]}
    assert {device.identifier for device in found} <= known
    assert collect_environment(torch.device("cuda", 0))["device"]["name"] == torch.cuda.get_device_name(0)
    assert collect_environment()["cudnn"]
