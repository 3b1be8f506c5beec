"""What Slurm gave a job on each of its nodes, read from `scontrol show job --details --oneliner`.

Standard library only: the launcher runs before anything slow is imported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tinyllm_ray.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """One node's part of an allocation."""

    node: str
    cpus: int
    gpus: int
    memory_mib: int
    """0 where Slurm does not hand out memory."""


_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_PART = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+")
_SHARE = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", re.ASCII)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", re.ASCII)
_MOST_NODES = 100_000


def expand_nodes(text: str) -> list[str]:
    """Node names of a Slurm node list: `gh[001-003,7],login` has five. Raises ConfigError for what is none.

    Several brackets in a name vary from the last on, as `scontrol show hostnames` has them.
    """
    parts = _PART.findall(text)
    if ",".join(parts) != text.strip() or not parts:
        raise ConfigError(f"{text!r} is no list of Slurm nodes, like gh001 or gh[001-004,010]")
    return [name for part in parts for name in _expand(part, text)]


def _expand(part: str, text: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise ConfigError(f"{text!r} is no list of Slurm nodes: {piece!r} is no range")
        for number in range(int(first), int(last) + 1):
            for ending in _expand(after, text) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{ending}"


def count_cpus(ids: str) -> int:
    """Processors in `0-3,8`. Raises ConfigError for anything else."""
    total = 0
    for piece in ids.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ConfigError(f"{ids!r} is no list of processors, like 0-3,8")
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def parse_shares(job: str) -> list[Share]:
    """Every node's share, in the order of the nodes. Raises ConfigError where the text has none."""
    shares = [
        Share(node, count_cpus(ids), sum(int(count) for count in _GPUS.findall(gres)), int(memory))
        for nodes, ids, memory, gres in _SHARE.findall(job)
        for node in expand_nodes(nodes)
    ]
    if not shares:
        raise ConfigError("Slurm does not say what the job has on its nodes; is it running?")
    order = {node: place for place, node in enumerate(expand_nodes(job_field(job, "NodeList") or shares[0].node))}
    return sorted(shares, key=lambda share: order.get(share.node, len(order)))


def job_field(text: str, name: str) -> str | None:
    """A field of `scontrol show job --oneliner` (or `show node`); None where it is not set."""
    match = re.search(rf"(?:^|\s){re.escape(name)}=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)", text)
    return match[1] if match and match[1] not in ("", "(null)", "N/A", "None", "Unknown") else None
