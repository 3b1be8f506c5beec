"""Judges a machine before a study spends an allocation on it: one line a check, with what to do.

A check is `ok`, `warn` where a study runs but its figures may suffer, or `fail` where it would not run as asked. The
facts come from `selfcheck_facts`; the GPU's part of them is judged in `selfcheck_gpu`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tinyllm_ray.cluster.selfcheck_facts import Disk, Facts
from tinyllm_ray.measure.numa import format_list, host_memory, memory_only

State = Literal["ok", "warn", "fail"]

_GIB = 2**30
_ROOM = {
    "out": (1, "records and the report; give --out a folder with room"),
    "tokens": (1, "the token cache; set TINYLLM_RAY_CACHE to a folder with room"),
    "compiled": (2, "compiled kernels; set TINYLLM_RAY_COMPILE_CACHE to a local folder with room"),
    "scratch": (2, "Ray's logs and the journal; give the site another scratch"),
    "shared memory": (1, "ranges of tokens for all trials; ask the site for a larger /dev/shm"),
}
"""GiB that each place should have, and for what."""
_LOCAL = ("compiled", "scratch")
_NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "cifs", "pvfs2", "wekafs", "fuse.juicefs")
_LEAST_FILES = 4096
_THREADS_A_RAY = 500
"""Ray's own daemons and a few workers; a worker for every core comes on top (30 threads each)."""
_THREADS_A_CORE = 30


@dataclass(frozen=True)
class Check:
    """One line."""

    name: str
    state: State
    value: str
    remedy: str = ""
    """What to do; empty where all is well."""

    def __str__(self) -> str:
        return f"{self.state:4}  {self.name:14} {self.value}{f'; {self.remedy}' if self.remedy else ''}"


def check_host(facts: Facts) -> Iterator[Check]:
    """The checks that do not need a GPU."""
    yield Check("python", "ok", f"{facts.python} on {facts.machine}")
    yield _ray(facts)
    yield _pages(facts)
    yield _numa(facts)
    yield _cores(facts)
    yield from map(_disk, facts.disks)
    yield from _limits(facts)
    yield from _compilers(facts)


def worst(checks: Iterable[Check]) -> State:
    """The worst state among checks."""
    states = {check.state for check in checks}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def _ray(facts: Facts) -> Check:
    problem = facts.ray.get("problem")
    if problem is None:
        return Check("ray", "ok", str(facts.ray.get("version")))
    what = f"{facts.ray.get('version') or 'not usable'}: {problem}"
    return Check("ray", "fail", what, "python -m pip install --upgrade 'ray[default,tune]>=2.50'")


def _pages(facts: Facts) -> Check:
    kib = facts.page_bytes // 1024
    ray = facts.ray.get("version")
    if kib == 4 or not facts.ray.get("problem"):
        return Check("pages", "ok", f"{kib} KB" + ("" if kib == 4 else f", and Ray {ray} runs with them"))
    return Check("pages", "fail", f"{kib} KB, Ray {ray} does not start", "a Ray built for such pages: 2.50 or later")


def _numa(facts: Facts) -> Check:
    nodes, alone = host_memory(facts.nodes), memory_only(facts.nodes)
    if not facts.nodes:
        return Check("numa", "ok", "the kernel tells of no nodes")
    value = ", ".join(
        f"node {node.number}: {node.memory_bytes / _GIB:.0f} GiB, processors {format_list(node.cpus)}" for node in nodes
    )
    if not alone:
        return Check("numa", "ok", value)
    what = "GPU memory" if facts.pci_gpus else "memory without processors"
    value += f"; {what}: nodes {format_list(node.number for node in alone)}"
    if facts.policy_bound is None:
        remedy = "this kernel or container refuses memory policies: start jobs with numactl --membind="
        return Check("numa", "warn", value, remedy + format_list(node.number for node in nodes))
    return Check("numa", "ok", f"{value}; host memory is kept off it")


def _cores(facts: Facts) -> Check:
    usable, host = facts.cores
    value = f"{usable} of {host} cores"
    if facts.governor in ("powersave", "conservative"):
        return Check("cores", "warn", f"{value}, governor {facts.governor}", "ask the site for governor performance")
    if usable == 1:
        return Check("cores", "warn", value, "Slurm gives one where nobody asks: --cpus-per-node, or --cpus-per-task")
    return Check("cores", "ok", value)


def _disk(disk: Disk) -> Check:
    gib, purpose = _ROOM[disk.use]
    if disk.free_bytes is None:
        return Check(disk.use, "fail", f"{disk.path}: {disk.problem}", f"needed for {purpose}")
    value = f"{disk.free_bytes / _GIB:.1f} GiB free in {disk.path}" + (f" ({disk.kind})" if disk.kind else "")
    if disk.free_bytes < gib * _GIB / 8:
        return Check(disk.use, "fail", value, f"{gib} GiB are wanted for {purpose}")
    if disk.free_bytes < gib * _GIB:
        return Check(disk.use, "warn", value, f"{gib} GiB are wanted for {purpose}")
    if disk.use in _LOCAL and disk.kind in _NETWORK:
        return Check(disk.use, "warn", value, f"a folder of the node's own is faster for {purpose}")
    return Check(disk.use, "ok", value)


def _limits(facts: Facts) -> Iterator[Check]:
    files, threads = facts.limits.get("NOFILE"), facts.limits.get("NPROC")
    if files is not None and files < _LEAST_FILES:
        state: State = "fail" if files < _LEAST_FILES // 4 else "warn"
        yield Check("open files", state, f"RLIMIT_NOFILE {files}", f"ulimit -n {_LEAST_FILES} in the site's setup")
    else:
        yield Check("open files", "ok", "no limit" if files is None else f"RLIMIT_NOFILE {files}")
    needed = _THREADS_A_RAY + _THREADS_A_CORE * facts.cores[0]
    if threads is None:
        yield Check("threads", "ok", "no limit")
    elif threads - (facts.threads or 0) < needed:
        value = f"RLIMIT_NPROC {threads}, {facts.threads or 'an unknown number'} in use"
        remedy = f"Ray needs about {needed} more: ulimit -u in the site's setup, or fewer cores for the job"
        yield Check("threads", "fail" if threads - (facts.threads or 0) < _THREADS_A_RAY else "warn", value, remedy)
    else:
        yield Check("threads", "ok", f"RLIMIT_NPROC {threads}")
    for name, meaning in (("AS", "address space"), ("FSIZE", "file size")):
        if facts.limits.get(name) is not None:
            value = f"RLIMIT_{name} {facts.limits[name]}"
            yield Check(meaning, "warn", value, "unlimited is wanted: CUDA reserves hundreds of GB of addresses")


def _compilers(facts: Facts) -> Iterator[Check]:
    on_gpu = bool(facts.pci_gpus or facts.smi_gpus)
    if facts.cpp_compiler:
        yield Check("compiler", "ok", ", ".join(name for name in (facts.c_compiler, facts.cpp_compiler) if name))
    elif on_gpu and facts.c_compiler:
        yield Check("compiler", "ok", f"{facts.c_compiler}; no g++, which only updates compiled for the CPU need")
    elif on_gpu:
        yield Check("compiler", "fail", "no C compiler, and Triton builds its launchers with one", "module load gcc")
    else:
        yield Check("compiler", "warn", "no g++", "compiled updates on the CPU need it: apt-get install g++")
    if on_gpu and not facts.python_header:
        remedy = "Triton builds its launchers with it: install python3-dev, or take a Python that has it"
        yield Check("Python.h", "fail", "not there", remedy)
