"""What a machine says of itself, for `selfcheck`: read from /sys and /proc, from nvidia-smi, torch and Ray.

Everything is asked once and judged elsewhere. What a system does not have is None or empty, what failed is a problem in
words. torch and Ray are asked in processes of their own, so that one that crashes or hangs is an answer too. `root`
stands for /, and nvidia-smi is whatever is on the PATH, so that recorded machines can be read as well as this one.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyllm_ray.cluster.numa_memory import MemoryPolicy
from tinyllm_ray.measure.environment import collect_environment, usable_cores
from tinyllm_ray.measure.gpu_sensors import open_sensors
from tinyllm_ray.measure.numa import NumaNode, gpu_addresses, numa_nodes

PROBE_SECONDS = 120.0
"""For torch or Ray to answer: a cold shared file system took 29 s for torch's imports alone."""
_SMI_SECONDS = 30.0

_FURTHER_FIELDS = {"most_clock_mhz": "clocks.max.sm", "default_watts": "power.default_limit"}
"""What nvidia-smi is asked beside the environment's own question, for each alone: older ones know fewer fields."""

_ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
found["devices"] = []
for index in range(torch.cuda.device_count() if found["available"] else 0):
    properties = torch.cuda.get_device_properties(index)
    device = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}", "problem": None}
    try:
        ones = torch.ones(16, 16, device=f"cuda:{index}")
        assert (ones @ ones).sum().item() == 16**3
    except Exception as error:
        device["problem"] = str(error).strip().splitlines()[0]
    found["devices"].append(device)
print(json.dumps(found))
"""
_ASK_RAY = """
import json, ray, subprocess
from pathlib import Path
server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
done = subprocess.run([server, "--version"], capture_output=True, text=True)
said = (done.stderr or done.stdout).strip().splitlines()
problem = said[0] if done.returncode and said else done.returncode or None
print(json.dumps({"version": ray.__version__, "problem": problem}))
"""
"""Ray's own processes bring an allocator that was once refused by 64 KB pages, which importing Ray does not show."""


@dataclass(frozen=True)
class Disk:
    """A place that a study writes to; `free_bytes` is None where it cannot be asked."""

    use: str
    path: str
    free_bytes: int | None
    kind: str | None
    """The file system's type."""
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """All of it; a field at its default is unknown."""

    python: str = ""
    machine: str = ""
    page_bytes: int = 4096
    nodes: Sequence[NumaNode] = ()
    pci_gpus: Sequence[str] = ()
    """PCI addresses, whether or not there is a driver."""
    policy_bound: bool | None = None
    smi_gpus: Sequence[Mapping[str, Any]] | None = None
    """What nvidia-smi lists, as `measure.environment` names it, with the sensors' `throttle_reasons`; None without."""
    smi_problem: str | None = None
    driver_cuda: str | None = None
    """The CUDA version that the driver goes up to."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    ray: Mapping[str, Any] = field(default_factory=dict)
    disks: Sequence[Disk] = ()
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits by their names without RLIMIT_; None is no limit."""
    threads: int | None = None
    """Of all processes of this user, as RLIMIT_NPROC counts them."""
    c_compiler: str | None = None
    cpp_compiler: str | None = None
    python_header: bool = True
    cores: tuple[int, int] = (1, 1)
    """Usable ones, and the host's."""
    governor: str | None = None


def gather(
    places: Mapping[str, str | Path], root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Facts:
    """This machine's facts; `places` are the folders a study would use, by what for."""
    found = collect_environment()
    smi = _with_sensors(found["gpus"])
    header, _ = _run(["nvidia-smi"], _SMI_SECONDS) if smi is not None else ("", None)
    cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", header)
    return Facts(
        python=platform.python_version(),
        machine=platform.machine(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        nodes=numa_nodes(root),
        pci_gpus=gpu_addresses(root),
        policy_bound=MemoryPolicy().bound(),
        smi_gpus=smi,
        smi_problem=found["problems"].get("gpus", "nvidia-smi is not there") if smi is None else None,
        driver_cuda=cuda[1] if cuda else None,
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
        torch=_ask(_ASK_TORCH),
        ray=_ask(_ASK_RAY),
        disks=[disk(use, Path(path), root) for use, path in places.items()],
        limits=_limits(),
        threads=_threads(root),
        c_compiler=_first("gcc", "cc", "clang"),
        cpp_compiler=_first("g++", "c++", "clang++"),
        python_header=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        cores=(usable_cores(), os.cpu_count() or 1),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
    )


def disk(use: str, path: Path, root: Path = Path("/")) -> Disk:
    """A place's free room; of a folder that is not there yet that of the one it would be made in."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as probe:  # a quota or a read-only mount shows only now
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        return Disk(use, str(path), None, None, error.strerror or str(error))
    return Disk(use, str(path), free, file_system(there, _text(root / "proc/self/mounts")))


def file_system(path: Path, mounts: str) -> str | None:
    """Type of the file system that `path` lies in, by /proc/self/mounts; None where that does not say."""
    best, kind = -1, None
    real = path.resolve()
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 3:
            point = Path(words[1].encode().decode("unicode_escape"))
            if real.is_relative_to(point) and len(point.parts) >= best:
                best, kind = len(point.parts), words[2]
    return kind


def _with_sensors(gpus: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if gpus is None:
        return None
    listed = [dict(gpu) for gpu in gpus]
    for name, field_name in _FURTHER_FIELDS.items():
        text, _ = _run(["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits"], _SMI_SECONDS)
        for gpu, value in zip(listed, text.splitlines(), strict=False):
            with contextlib.suppress(ValueError):
                gpu[name] = float(value)
    for gpu in listed:
        sensors = open_sensors(gpu["uuid"])
        state = sensors.read() if sensors else None
        gpu["throttle_reasons"] = state.throttle_reasons if state else None
    return listed


def _ask(code: str) -> dict[str, Any]:
    """What a Python of its own prints as JSON; its last words on standard error as `problem` where it fails."""
    text, problem = _run([sys.executable, "-c", code], PROBE_SECONDS)
    if problem:
        return {"problem": problem}
    try:
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return {"problem": f"an answer that is none: {text[-200:]!r}"}
    return found


def _run(command: list[str], seconds: float) -> tuple[str, str | None]:
    """A command's output, and what went wrong."""
    if shutil.which(command[0]) is None:
        return "", f"{command[0]} is not there"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"no answer within {seconds:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return "", f"{Path(command[0]).name}: {reason}"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing said"]
        return "", f"{said[-1]} (status {done.returncode})"
    return done.stdout, None


def _limits() -> dict[str, int | None]:
    import resource

    names = ("NOFILE", "NPROC", "AS", "FSIZE", "STACK")
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _threads(root: Path) -> int | None:
    """Threads of this user's processes; None where /proc is not there."""
    total = 0
    for status in (root / "proc").glob("[0-9]*/status"):
        fields = dict(line.split(":", 1) for line in _text(status).splitlines() if ":" in line)
        if fields.get("Uid", "").split()[:1] == [str(os.getuid())]:
            total += int(fields.get("Threads", "0"))
    return total or None


def _first(*names: str) -> str | None:
    return next((name for name in names if shutil.which(name)), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
