"""A CUDA graph's stand-in on the CPU: operators are recorded with the tensors they had, and played again on those.

As with a graph, capturing executes nothing that lasts, numbers that were Python's are as they were at the capture, a
tensor that was replaced since is not seen, results land in the memory they had, and the host may not read one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinyllm_ray.train.update import Statistics

aten = torch.ops.aten
_HOST_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}


class Operation(NamedTuple):
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: Any


class Tape(TorchDispatchMode):
    """Records what runs while entered; `rewind` takes back what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that Dynamo lets code that is compiled already run under it."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if function in _HOST_READS:
            raise RuntimeError(f"{function} is not permitted when stream is capturing")
        keywords = keywords or {}
        self._keep(function, arguments, keywords)
        results = function(*arguments, **keywords)
        self.operations.append(Operation(function, arguments, keywords, results))
        return results

    def rewind(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)

    def play(self) -> None:
        with torch.no_grad():
            for function, arguments, keywords, results in self.operations:
                again = function(*arguments, **keywords)
                for place, value in zip(tensors(results), tensors(again), strict=True):
                    if place.data_ptr() != value.data_ptr():
                        place.detach().copy_(value)

    def _keep(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """What `function` will overwrite, as it was before the first time."""
        given = dict(zip((one.name for one in function._schema.arguments), arguments, strict=False)) | keywords
        for one in function._schema.arguments:
            if one.is_write and one.name in given:
                for tensor in tensors(given[one.name]):
                    storage = tensor.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))


class TapeCapture:
    """Satisfies `train.graph_update.Capture`; `log` says what was called."""

    def __init__(self, *_: object) -> None:
        self.log: list[str] = []
        self._tape = Tape()

    def warm_up(self, work: Callable[[], Statistics]) -> Statistics:
        self.log.append("warm_up")
        return work()

    def capture(self, work: Callable[[], Statistics]) -> Statistics:
        self.log.append("capture")
        with self._tape:
            found = work()
        self._tape.rewind()
        return found

    def replay(self) -> None:
        self.log.append("replay")
        self._tape.play()

    def reset(self) -> None:
        self.log.append("reset")
        self._tape = Tape()


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
