"""Judges driver, PyTorch and GPUs of a machine, and names the PyTorch that fits it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinyllm_ray.cluster.selfcheck import Check
from tinyllm_ray.cluster.selfcheck_facts import Facts
from tinyllm_ray.records import THROTTLING

TORCH_INDEX = "https://download.pytorch.org/whl"
"""PyTorch's own package index, a folder for every CUDA version it is built for."""
_BUILDS = ((13, 0, "cu130"), (12, 8, "cu128"), (12, 0, "cu126"))
"""The least CUDA version of a driver, and the newest build of torch 2.9 and later that it runs. Within CUDA 12 an older
driver runs a newer build (CUDA's minor version compatibility)."""
_OFTEN_USED_MIB = 1024
"""A GPU that is nobody's holds some 500 MiB, of the driver."""


def check_gpus(facts: Facts) -> Iterator[Check]:
    """The checks of driver, PyTorch and GPUs; two lines on a machine that has none."""
    yield _driver(facts)
    yield _torch(facts)
    if not has_gpu(facts):
        return
    yield _visibility(facts)
    yield _kinds(facts)
    yield from _state(facts.smi_gpus or ())


def has_gpu(facts: Facts) -> bool:
    """Whether the machine has an NVIDIA GPU, with or without a driver that works."""
    return bool(facts.pci_gpus or facts.smi_gpus)


def torch_command(driver_cuda: str | None) -> str:
    """The command that installs the PyTorch for a driver; empty where it is too old for all of them."""
    major, minor = _version(driver_cuda) or _BUILDS[-1][:2]
    for least_major, least_minor, build in _BUILDS:
        if (major, minor) >= (least_major, least_minor):
            return f"{sys.executable} -m pip install --force-reinstall 'torch>=2.9' --index-url {TORCH_INDEX}/{build}"
    return ""


def _driver(facts: Facts) -> Check:
    if facts.smi_gpus:
        version = facts.smi_gpus[0].get("driver")
        if facts.driver_cuda and not torch_command(facts.driver_cuda):
            value = f"{version}, for CUDA {facts.driver_cuda}"
            return Check(
                "driver", "fail", value, "PyTorch 2.9 needs a driver for CUDA 12: ask the site for 525 or later"
            )
        return Check("driver", "ok", f"{version}, up to CUDA {facts.driver_cuda or 'unknown'}")
    if facts.pci_gpus:
        remedy = "the job has to ask Slurm for GPUs (--gpus-per-node), or the driver is not loaded on this node"
        return Check(
            "driver", "fail", f"{len(facts.pci_gpus)} GPUs on the bus; {facts.smi_problem or 'none listed'}", remedy
        )
    return Check("driver", "ok", "no NVIDIA GPU; studies run on the CPU")


def _torch(facts: Facts) -> Check:
    found = facts.torch
    command = torch_command(facts.driver_cuda)
    if problem := found.get("problem"):
        return Check("torch", "fail", str(problem), command if has_gpu(facts) else "python -m pip install 'torch>=2.9'")
    value = f"{found.get('version')}, " + (f"CUDA {found['cuda']}" if found.get("cuda") else "CPU only")
    if _version(str(found.get("version"))) < (2, 9):
        return Check("torch", "fail", value, command if has_gpu(facts) else "python -m pip install 'torch>=2.9'")
    if not has_gpu(facts):
        return Check("torch", "ok", value)
    if not found.get("cuda"):
        return Check("torch", "fail", f"{value}, on a machine with GPUs", command)
    driver = _version(facts.driver_cuda)
    if driver and _version(found["cuda"])[:1] > driver[:1]:
        return Check("torch", "fail", f"{value}, and the driver goes up to {facts.driver_cuda}", command)
    if broken := [device for device in found.get("devices", ()) if device["problem"]]:
        capability = broken[0]["capability"]
        value += f"; a product on {broken[0]['name']} ({capability}) fails: {broken[0]['problem']}"
        return Check("torch", "fail", value, command)
    return Check("torch", "ok", value)


def _visibility(facts: Facts) -> Check:
    listed = len(facts.smi_gpus) if facts.smi_gpus is not None else 0
    seen = len(facts.torch.get("devices", ()))
    asked = "not set" if facts.visible is None else repr(facts.visible)
    value = f"PyTorch sees {seen} of {listed} GPUs, CUDA_VISIBLE_DEVICES {asked}"
    if seen == 0 and facts.torch.get("cuda"):
        remedy = (
            "unset it, or ask Slurm for GPUs" if facts.visible is not None else "see nvidia-smi, and the driver's log"
        )
        return Check("visible", "fail", value, remedy)
    if facts.visible is None and seen not in (0, listed):
        return Check("visible", "warn", value, "a GPU is there that PyTorch does not use; see nvidia-smi")
    return Check("visible", "ok", value)


def _kinds(facts: Facts) -> Check:
    names = [str(gpu.get("name")) for gpu in facts.smi_gpus or ()]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "unknown"
    if len(set(names)) > 1:
        remedy = "a study is of one kind: choose by CUDA_VISIBLE_DEVICES, or by the site's constraint"
        return Check("gpus", "warn", counts, remedy)
    if any(gpu.get("mig_mode") == "Enabled" for gpu in facts.smi_gpus or ()):
        return Check("gpus", "warn", f"{counts}, in slices (MIG)", "sensors and figures are those of a slice")
    return Check("gpus", "ok", counts)


def _state(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """A line a GPU: its clocks, and what it is busy with already."""
    for index, gpu in enumerate(gpus):
        clocks = f"{_number(gpu.get('sm_clock_mhz'))} of {_number(gpu.get('most_clock_mhz'))} MHz"
        value = f"{clocks}, {_number(gpu.get('power_watts'))} of {_number(gpu.get('power_limit_watts'))} W"
        reasons = set(gpu.get("throttle_reasons") or ())
        used, limit, default = (
            gpu.get(name) or 0 for name in ("used_memory_mib", "power_limit_watts", "default_watts")
        )
        remedy = ""
        if used > _OFTEN_USED_MIB:
            value += f"; {used:.0f} MiB are in use"
            remedy = "somebody else measures there too: ask for the node alone (--sbatch=--exclusive)"
        elif brakes := sorted(reasons & THROTTLING):
            value += f"; held by {', '.join(brakes)}"
            remedy = "idle and held back, its figures will be low: ask the site, or leave the node out"
        elif 0 < limit < default:
            remedy = f"its power limit is below the default of {default:.0f} W: compare with such devices only"
        elif "applications_clocks_setting" in reasons:
            remedy = "its clocks are set by hand: compare with such devices only"
        yield Check(f"gpu {index}", "warn" if remedy else "ok", value, remedy)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _version(text: str | None) -> tuple[int, ...]:
    """`13.0` as (13, 0); empty for none."""
    pieces = (text or "").split("+")[0].split(".")[:2]
    return tuple(int(piece) for piece in pieces) if all(piece.isdecimal() for piece in pieces) else ()
