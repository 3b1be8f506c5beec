"""How fast bytes move: within host memory, between host and device, within the device.

`python -m tinyllm_ray.measure.bandwidth` prints one JSON line for the device that it sees first; selfcheck runs it in a
process of its own on each of them.
"""

import json
import time
from collections.abc import Callable

import torch

from tinyllm_ray.clock import Clock

_BYTES = 256 * 2**20
"""Beyond the caches of every processor the project runs on (GH200's has 117 MB)."""
_REPEATS = 5


def bandwidths(size: int = _BYTES, clock: Clock = time.perf_counter) -> dict[str, float | None]:
    """GB/s of the best of five copies of `size` bytes; None for what goes to a device where there is none.

    `host` and `device` count the bytes read and the bytes written, as STREAM's copy does; the others what goes over.
    """
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    found: dict[str, float | None] = {
        "host": 2 * size / _best(lambda: target.copy_(source), clock) / 1e9,
        "to_device": None,
        "from_device": None,
        "device": None,
    }
    if not torch.cuda.is_available():
        return found
    pinned = torch.ones(size, dtype=torch.uint8).pin_memory()
    there, other = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def waited(copy: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            copy()
            torch.cuda.synchronize()

        return run

    found["to_device"] = size / _best(waited(lambda: there.copy_(pinned, non_blocking=True)), clock) / 1e9
    found["from_device"] = size / _best(waited(lambda: pinned.copy_(there, non_blocking=True)), clock) / 1e9
    found["device"] = 2 * size / _best(waited(lambda: other.copy_(there)), clock) / 1e9
    return found


def _best(copy: Callable[[], object], clock: Clock) -> float:
    """Seconds of the fastest of some copies, the first of which touches its pages and does not count."""
    copy()
    least = float("inf")
    for _ in range(_REPEATS):
        began = clock()
        copy()
        least = min(least, clock() - began)
    return least


if __name__ == "__main__":
    print(json.dumps(bandwidths()), flush=True)
