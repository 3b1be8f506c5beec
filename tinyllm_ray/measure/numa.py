"""A machine's NUMA nodes, which of them are a GPU's memory, and which processors are near a GPU.

On coherent machines (GH200) a GPU's memory is a NUMA node without processors beside those of the CPU: nodes 1 to 8 of
one GH200, its node 0 having the cores; 36 nodes where four of them are together. Read from /sys and /proc, which tests
replace by recorded layouts. Standard library only: a job's step imports this module.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
"""PCI's class of VGA (0x0300) and 3D (0x0302) controllers."""


@dataclass(frozen=True)
class NumaNode:
    """One node; `cpus` is empty where it is memory alone, of a GPU or an expansion."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """All nodes that are online; none where the kernel tells of none."""
    folder = root / "sys/devices/system/node"
    nodes = []
    for number in sorted(parse_list(_text(folder / "online"))):
        place = folder / f"node{number}"
        nodes.append(NumaNode(number, frozenset(parse_list(_text(place / "cpulist"))), _memory_bytes(place)))
    return nodes


def memory_only(nodes: Iterable[NumaNode]) -> list[NumaNode]:
    """Nodes that hold memory and no processor: where memory of the host should not lie."""
    return [node for node in nodes if node.memory_bytes and not node.cpus]


def host_memory(nodes: Iterable[NumaNode]) -> list[NumaNode]:
    """Nodes that hold memory beside processors."""
    return [node for node in nodes if node.memory_bytes and node.cpus]


def gpu_addresses(root: Path = Path("/")) -> list[str]:
    """PCI addresses of all NVIDIA GPUs of the machine, this job's or not, like `0009:01:00.0`."""
    folder = root / "sys/bus/pci/devices"
    with contextlib.suppress(OSError):
        return sorted(device.name for device in folder.iterdir() if _is_gpu(device))
    return []


def cpus_near(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Processors of the GPU's NUMA node; empty where that is not known.

    The driver may name the node of the GPU's own memory, which has none: then what the bus says is near.
    """
    device = root / "sys/bus/pci/devices" / address.lower()
    node = _text(device / "numa_node")
    if node.isdecimal():
        cpus = parse_list(_text(root / f"sys/devices/system/node/node{node}/cpulist"))
        if cpus:
            return frozenset(cpus)
    return frozenset(parse_list(_text(device / "local_cpulist")))


def bus_address(nvml: str) -> str:
    """A PCI address as /sys has it, from NVML's, whose domain has eight digits."""
    domain, colon, rest = nvml.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def parse_list(text: str) -> set[int]:
    """Numbers of the kernel's `0-3,8`; none of an empty or damaged one."""
    numbers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def format_list(numbers: Iterable[int]) -> str:
    """`0-3,8` of numbers; empty for none."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in pieces)


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY_CLASS)


def _memory_bytes(node: Path) -> int:
    for line in _text(node / "meminfo").splitlines():
        words = line.split()
        if "MemTotal:" in words and words[-2].isdecimal():
            return int(words[-2]) * 1024
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
