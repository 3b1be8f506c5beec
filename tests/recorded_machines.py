"""Machines as their /sys and /proc describe them: NUMA nodes, GPUs and page sizes, laid out under a folder.

The layouts of GH200 nodes are those that people have published of theirs (`lscpu`): node 0 with processors 0-71 and
eight nodes without any; 36 nodes where four superchips are together, the GPUs' memory in nodes 4, 12, 20 and 28.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

GIB_IN_KB = 2**20


def write_machine(
    root: Path, nodes: Mapping[int, tuple[str, int]], gpus: Mapping[str, tuple[int, str]], mems_allowed: str = ""
) -> Path:
    """`nodes`: number to processors and GiB. `gpus`: PCI address to the bus's NUMA node and near processors."""
    place = root / "sys/devices/system/node"
    for number, (cpus, gib) in nodes.items():
        (place / f"node{number}").mkdir(parents=True)
        (place / f"node{number}/cpulist").write_text(f"{cpus}\n")
        text = f"Node {number} MemTotal:       {gib * GIB_IN_KB} kB\nNode {number} MemFree:        1 kB\n"
        (place / f"node{number}/meminfo").write_text(text)
    place.mkdir(parents=True, exist_ok=True)
    (place / "online").write_text(f"{min(nodes)}-{max(nodes)}\n")
    for address, (node, cpus) in gpus.items():
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        facts = {"vendor": "0x10de", "class": "0x030200", "numa_node": node, "local_cpulist": cpus}
        for name, value in facts.items():
            (device / name).write_text(f"{value}\n")
    bridge = root / "sys/bus/pci/devices/0000:00:00.0"  # an NVIDIA bridge is no GPU
    bridge.mkdir(parents=True)
    (bridge / "vendor").write_text("0x10de\n")
    (bridge / "class").write_text("0x060400\n")
    status = root / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text(f"Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t{mems_allowed}\n")
    return root


def gh200(root: Path) -> Path:
    """One superchip."""
    nodes = {0: ("0-71", 480), 1: ("", 96)} | dict.fromkeys(range(2, 9), ("", 0))
    return write_machine(root, nodes, {"0009:01:00.0": (0, "0-71")}, "0-8")


def gh200_four(root: Path) -> Path:
    """Four superchips in one node."""
    nodes = {number: (f"{72 * number}-{72 * number + 71}", 120) for number in range(4)}
    nodes |= {number: ("", 96 if number % 8 == 4 else 0) for number in range(4, 36)}
    gpus = {f"00{9 + 16 * k:02x}:01:00.0": (k, f"{72 * k}-{72 * k + 71}") for k in range(4)}
    return write_machine(root, nodes, gpus, "0-35")


def two_sockets(root: Path, gpus: Sequence[str] = ()) -> Path:
    """Two sockets of 16 cores, two GPUs at each."""
    near = {0: "0-15", 1: "16-31"}
    addresses = gpus or [f"0000:{bus:02x}:00.0" for bus in (0x18, 0x2A, 0x9A, 0xAB)]
    places = {address: (index // 2, near[index // 2]) for index, address in enumerate(addresses)}
    return write_machine(root, {0: ("0-15", 256), 1: ("16-31", 256)}, places)


def laptop(root: Path) -> Path:
    """One node; its bus does not say where a GPU is."""
    return write_machine(root, {0: ("0-7", 16)}, {"0000:01:00.0": (-1, "0-7")})
