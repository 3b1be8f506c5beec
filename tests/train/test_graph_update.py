"""The bookkeeping of captured updates, with operators recorded on the CPU in the place of a CUDA graph.

What a graph itself does is tested on a GPU (test_graph_on_gpu.py), what trainings make of it in test_graph_training.py.
"""

import re
from collections.abc import Callable

import pytest
import torch
from tape import Tape, TapeCapture

from tinyllm_ray.config import Config
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.graph_update import WARM_UP_UPDATES, DirectUpdate, GraphUpdate, build_run
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import Statistics

MakeConfig = Callable[..., Config]

CPU = torch.device("cpu")


def rows(*values: int, dtype: torch.dtype = torch.uint16) -> torch.Tensor:
    return torch.tensor([values]).to(dtype)


class Sums:
    """An update in small: its loss is the sum of all rows so far, times a factor that the host sets."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.int64)
        self.factor = torch.ones(())
        self.seen: list[torch.Tensor] = []

    def run(self, batch: torch.Tensor) -> Statistics:
        self.seen.append(batch)
        self.total.add_(batch.sum())
        return Statistics(self.total * self.factor, batch.sum() * 1.0)


class TestOrder:
    def test_warms_up_captures_once_and_replays_from_then_on(self) -> None:
        capture = TapeCapture()
        update = GraphUpdate(Sums().run, capture)
        for _ in range(6):
            update(rows(1, 2))
        assert capture.log == ["warm_up"] * WARM_UP_UPDATES + ["capture"] + ["replay"] * (6 - WARM_UP_UPDATES)

    def test_every_update_is_made_once_on_its_own_rows(self) -> None:
        sums = Sums()
        update = GraphUpdate(sums.run, TapeCapture())
        found = [update(rows(number, 10 * number)) for number in range(8)]
        assert [one.grad_norm.item() for one in found] == [11 * number for number in range(8)]
        assert [one.loss.item() for one in found] == [11 * sum(range(number + 1)) for number in range(8)]
        assert sums.total.item() == 11 * sum(range(8))

    def test_statistics_stay_as_they_were(self) -> None:
        """They are read some updates later."""
        update = GraphUpdate(Sums().run, TapeCapture())
        found = [update(rows(number, 0)) for number in range(8)]
        places = {tensor.data_ptr() for one in found for tensor in one}
        assert len(places) == 2 * len(found)

    def test_what_the_host_writes_into_a_tensor_counts_from_then_on(self) -> None:
        sums = Sums()
        update = GraphUpdate(sums.run, TapeCapture())
        found = []
        for number in range(8):
            sums.factor.fill_(number)
            found.append(update(rows(1, 0)).loss.item())
        assert found == [number * (number + 1) for number in range(8)]

    def test_ids_widen_inside(self) -> None:
        """65,535 is no int16, and what is read are the buffer's ids."""
        sums = Sums()
        update = GraphUpdate(sums.run, TapeCapture())
        assert [update(rows(65535 - number, 0)).grad_norm.item() for number in range(5)] == [
            65535 - number for number in range(5)
        ]
        assert {batch.dtype for batch in sums.seen} == {torch.int64}

    def test_the_rows_may_be_overwritten_once_the_call_is_over(self) -> None:
        update = GraphUpdate(Sums().run, TapeCapture())
        batch = rows(7, 0)
        for _ in range(6):
            batch.copy_(rows(7, 0))
            assert update(batch).grad_norm.item() == 7
            batch.zero_()


class TestFaults:
    @pytest.mark.parametrize("other", [rows(1, 2, 3), rows(1), rows(1, 2, dtype=torch.int64)])
    @pytest.mark.parametrize("before", [1, 5])
    def test_rows_of_another_kind_are_refused(self, before: int, other: torch.Tensor) -> None:
        update = GraphUpdate(Sums().run, TapeCapture())
        for _ in range(before):
            update(rows(1, 2))
        with pytest.raises(ValueError, match=r"does not fit an update that was captured for torch.uint16 \(1, 2\)"):
            update(other)
        assert update(rows(1, 2)).grad_norm.item() == 3

    def test_an_update_that_reads_on_the_host_cannot_be_captured(self) -> None:
        sums = Sums()

        def reading(batch: torch.Tensor) -> Statistics:
            found = sums.run(batch)
            assert found.loss.item() >= 0
            return found

        update = GraphUpdate(reading, TapeCapture())
        for _ in range(WARM_UP_UPDATES):
            update(rows(1, 2))
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            update(rows(1, 2))

    def test_an_update_that_fails_while_warming_up_says_so(self) -> None:
        def fail(batch: torch.Tensor) -> Statistics:
            raise MemoryError

        with pytest.raises(MemoryError):
            GraphUpdate(fail, TapeCapture())(rows(1, 2))


class TestAsked:
    def test_updates_of_other_kinds_run_as_they_are(self, tiny: MakeConfig) -> None:
        for kind in ("eager", "compiled"):
            run = build_run(Sums().run, tiny(execution={"update": kind}), CPU)
            assert isinstance(run, DirectUpdate)
            assert run(rows(1, 2)).grad_norm.item() == 3

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_cpu_is_refused(self, tiny: MakeConfig) -> None:
        with pytest.raises(ConfigError, match=r"execution.update: 'graph' \(a CPU has eager, compiled\) needs a GPU"):
            Trainer(tiny(execution={"update": "graph"}), None)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_all_that_a_cpu_has_not_is_said_at_once(self, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        execution = {"update": "graph", "norm_kernel": "triton", "residual_dtype": "bfloat16"}
        words = (
            "execution.update: 'graph' (a CPU has eager, compiled), execution.norm_kernel: 'triton' (a CPU has torch), "
            "execution.residual_dtype: 'bfloat16' (a CPU has float32) need a GPU, and there is none"
        )
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
            Trainer(tiny(execution=execution), None)

    def test_processes_are_refused(self, tiny: MakeConfig) -> None:
        with pytest.raises(ConfigError, match=r"graph captures .*take"):
            tiny(packing={"models": 2}, execution={"update": "graph", "packed_backward": "processes"})


class TestTape:
    """The stand-in freezes what a graph would."""

    @staticmethod
    def capture(work: Callable[[], torch.Tensor]) -> tuple[TapeCapture, torch.Tensor]:
        tape = TapeCapture()
        found = tape.capture(lambda: Statistics(work(), torch.zeros(())))
        return tape, found.loss

    def test_capturing_leaves_everything_as_it_was(self) -> None:
        weight = torch.zeros(3)
        tape, found = self.capture(lambda: weight.add_(1).sum())
        assert weight.tolist() == [0, 0, 0]
        tape.replay()
        tape.replay()
        assert weight.tolist() == [2, 2, 2]
        assert found.item() == 6

    def test_a_number_of_pythons_is_frozen(self) -> None:
        rate = [1.0]
        tape, found = self.capture(lambda: torch.ones(()) * rate[0])
        rate[0] = 2.0
        tape.replay()
        assert found.item() == 1.0

    def test_a_tensor_that_took_anothers_place_is_not_seen(self) -> None:
        held = {"fault": torch.zeros(())}

        def work() -> torch.Tensor:
            held["fault"] = held["fault"] + 1
            return held["fault"] * 1

        tape, found = self.capture(work)
        for _ in range(3):
            tape.replay()
        assert found.item() == 1.0, "and not 3"


def test_the_tape_lets_no_host_read_pass() -> None:
    with Tape(), pytest.raises(RuntimeError, match="capturing"):
        torch.ones(()).item()
