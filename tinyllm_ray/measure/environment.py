"""What machine, which versions, which source: the facts that a figure depends on beside its configuration.

Every probe stands alone: what a machine does not have is None, what failed is named under `problems`. Nothing here
imports torch or touches CUDA; where torch is loaded already it is asked.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinyllm_ray
from tinyllm_ray.records import Device

_PACKAGES = ("torch", "triton", "ray", "numpy", "pydantic", "datasets", "transformers", "tokenizers", "safetensors")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "uuid": "uuid",
    "total_memory_mib": "memory.total",
    "used_memory_mib": "memory.used",
    "driver": "driver_version",
    "temperature_celsius": "temperature.gpu",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "sm_clock_mhz": "clocks.sm",
    "mig_mode": "mig.mode.current",
}
_PROBE_SECONDS = 10.0
"""For a command; nvidia-smi needs 2 to 5 s where the driver is not kept loaded."""
_SECRET_NAME = re.compile(r"JWT|TOKEN|SECRET|PASS|CRED|AUTH|KEY", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"eyJ[\w-]{8,}\.|://[^/\s]*:[^/\s]*@")
"""A JSON web token, or a URL with a password."""


@dataclass(frozen=True)
class SourceIdentity:
    """Which source of this package runs; revision and state are git's, None outside a checkout."""

    sha256: str
    """Over names and contents of the package's files."""
    revision: str | None
    dirty: bool | None
    """Whether the package's files differ from the revision."""


def collect_environment(torch_device: Any = None) -> dict[str, Any]:
    """Everything worth keeping beside a record, as JSON values; with `torch_device` that device too."""
    problems: dict[str, str] = {}
    gpus = _gpus(problems)
    environment = {
        "python": sys.version,
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "versions": installed_versions(),
        "cuda": cuda_version(),
        "cudnn": _cudnn_version(),
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "gpu_topology": _run(problems, "gpu_topology", "nvidia-smi", "topo", "-m"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "affinity": sorted(_affinity()),
            "memory_bytes": _host_memory_bytes(),
        },
        "threads": _variables(lambda name: name in _THREAD_VARIABLES),
        "slurm": _variables(lambda name: name.startswith("SLURM_")),
        "git": _git(problems),
    }
    if torch_device is not None:
        environment["device"] = _device(torch_device).model_dump(mode="json")
    return environment | {"problems": problems}


@functools.cache
def source_identity() -> SourceIdentity:
    """The identity of the package's files as they were when first asked.

    The files of `search_spaces` are left out: they are inside the package only in a wheel, and a study's record holds
    what it took from them.
    """
    root = Path(tinyllm_ray.__file__).parent
    digest = hashlib.sha256()
    files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    for name, path in sorted(files.items()):
        if name.parts[0] == "search_spaces" or "__pycache__" in name.parts or path.suffix not in {".py", ".yaml"}:
            continue
        content = path.read_bytes()
        digest.update(f"{name.as_posix()}\n{len(content)}\n".encode() + content)
    git = _git({}) or {}
    return SourceIdentity(digest.hexdigest(), git.get("revision"), git.get("dirty"))


def usable_cores() -> int:
    """CPU cores this process may keep busy: its affinity, Slurm's share of a task and the control group's quota."""
    limits: list[float] = [len(_affinity())]
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdecimal():
        limits.append(int(per_task))
    limits += _cgroup_cores(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, int(min(limits)))


@functools.cache
def machine_fingerprint() -> str:
    """Sixteen hex digits that are equal where compiled code may be shared, whatever the host's name."""
    gpus = _gpus({}) or []
    versions = installed_versions()
    parts = [
        platform.machine(),
        _cpu_model(),
        *sorted({gpu["name"] for gpu in gpus}),
        gpus[0]["driver"] if gpus else None,
        versions["torch"],
        versions["triton"],
        cuda_version(),
        platform.python_version(),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def devices() -> list[Device]:
    """The CUDA devices that this process sees where torch is loaded, else the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return [_device("cpu")]
    return [_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _device(torch_device: Any) -> Device:
    host = socket.gethostname()
    if str(torch_device).partition(":")[0] != "cuda":
        name = _cpu_model() or platform.machine()
        return Device(kind="cpu", name=name, host=host, total_memory_bytes=_host_memory_bytes())
    properties = sys.modules["torch"].cuda.get_device_properties(torch_device)
    uuid = getattr(properties, "uuid", None)
    return Device(
        kind="cuda",
        name=properties.name,
        identifier=None if uuid is None else f"GPU-{uuid}",
        host=host,
        total_memory_bytes=properties.total_memory,
    )


def installed_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"tinyllm_ray": tinyllm_ray.__version__, **dict.fromkeys(_PACKAGES)}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def cuda_version() -> str | None:
    """What torch was built for, from its version file; not by `runpy`, which changes sys.argv under other threads."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version: dict[str, str | None] = {}
    exec(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"), version)
    return version.get("cuda")


def _cudnn_version() -> str | None:
    """The loaded torch's word, else the installed wheel's version."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.backends.cudnn.is_available():
        number = torch.backends.cudnn.version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    # By its name: a search would open a file of every package, 140 of them, on a file system that may be slow.
    major = (cuda_version() or "").partition(".")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(f"nvidia-cudnn-cu{major}")
    return None


def _gpus(problems: dict[str, str]) -> list[dict[str, Any]] | None:
    """The machine's GPUs, visible to this process or not; None where nvidia-smi is missing or failed."""
    query = f"--query-gpu={','.join(_GPU_FIELDS.values())}"
    text = _run(problems, "gpus", "nvidia-smi", query, "--format=csv,noheader,nounits")
    if text is None:
        return None
    return [dict(zip(_GPU_FIELDS, map(_figure, line.split(", ")), strict=False)) for line in text.splitlines()]


def _figure(text: str) -> str | int | float | None:
    if text.startswith("[") or text == "N/A":  # [N/A], [Not Supported], [Unknown Error]
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _git(problems: dict[str, str]) -> dict[str, Any] | None:
    package = Path(tinyllm_ray.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    # Without optional locks: asking must not write into the checkout.
    git = ("git", "--no-optional-locks", "-C", str(package))
    revision = _run(problems, "git_revision", *git, "rev-parse", "HEAD")
    changes = _run(problems, "git_status", *git, "status", "--porcelain", "--", ".")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _run(problems: dict[str, str], name: str, *command: str) -> str | None:
    """What a command prints; None if it is not there, or fails, and then `problems` says how."""
    if shutil.which(command[0]) is None:
        return None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        problems[name] = f"{command[0]}: {error}"
        return None
    try:
        output, errors = process.communicate(timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        # A command that waits for a hanging driver outlives SIGKILL, so its end is not waited for either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        problems[name] = f"{' '.join(command)}: no answer within {_PROBE_SECONDS:.0f} s"
        return None
    if process.returncode:
        said = (errors or output).strip().splitlines()
        problems[name] = f"{' '.join(command)}: status {process.returncode}: {said[0] if said else 'nothing said'}"
        return None
    return output.strip()


def _variables(wanted: Callable[[str], bool]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if wanted(name) and not _SECRET_NAME.search(name) and not _SECRET_VALUE.search(value)
    }


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str | None:
    """The name on x86; on ARM, whose cpuinfo has none, implementer and part."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # no Linux
        return platform.processor() or None
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"{platform.machine()} implementer {fields.get('CPU implementer')} part {fields['CPU part']}"
    return None


def _cgroup_cores(mount: Path, membership: Path) -> Iterator[float]:
    """The CPU quotas of this process's control group and of those above it, in cores."""
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = mount / (controllers and "cpu") / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(mount):
                break
            yield from _quota(group)


def _quota(group: Path) -> list[float]:
    """Version 2 writes `max 100000` or `150000 100000`, version 1 two files and -1 for no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):  # not this version, or the root, which has no limit
            quota, period = " ".join((group / name).read_text() for name in names).split()
            return [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return []
