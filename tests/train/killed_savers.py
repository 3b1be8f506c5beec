"""Forks savers of checkpoints, kills each amid it, and prints what it found: `killed_savers.py FOLDER CONFIG MODELS`.

With MODELS of 0 it is one model that is saved, else a pack of so many, killed at every step only. All savers come from
this process, which has PyTorch imported. A checkpoint of step N has N in every weight and moment, so that a mixture of
two would show.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_states import CACHE, PackedTraining, Training

from tinyllm_ray.config import load
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, prune, save_checkpoint

_KILLS = 50


class Savers:
    """Saves and loads checkpoints of one run; forks save, and this process looks at what they leave."""

    def __init__(self, run: Path, training: Training) -> None:
        run.mkdir()
        self.run = run
        self._training = training

    def save(self, step: int) -> None:
        self._fill(step)
        training = self._training
        progress = {"step": step}
        save_checkpoint(
            self.run, step, training.model, training.optimizer, progress, training.config, CACHE, average=True
        )

    def found(self) -> int:
        """The step of what a resuming run gets; fails where it is not whole."""
        training = self._training
        self._fill(-1)
        checkpoint = find_checkpoint(self.run)
        checkpoint.load_weights(training.model)
        assert checkpoint.load_training(training.model, training.optimizer) == {"step": checkpoint.step}
        values = [*training.weights().values(), *training.moments().values()]
        assert all(bool((value == checkpoint.step).all()) for value in values if value.is_floating_point())
        return checkpoint.step

    def temporary(self) -> list[str]:
        return sorted(path.name for path in (self.run / "checkpoints").glob(".step-*"))

    def _fill(self, step: int) -> None:
        with torch.no_grad():
            for weight in self._training.model.parameters():
                weight.fill_(step)
        for state in self._training.optimizer.state.values():
            for value in state.values():
                if value.is_floating_point():  # whether a model has stopped is no number
                    value.fill_(step)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"saver: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def at_event(number: int, run: Path, act: Callable[[], None]) -> None:
    """Call `act` at the `number`th thing that this process does in the folder: open, make, rename, remove, list."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if arguments and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(str(run)):
            seen += 1
            if seen == number:
                act()

    sys.addaudithook(hook)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_random_times(savers: Savers) -> dict[str, Any]:
    """Savers that save and prune without end; what each had finished is read from a pipe."""
    random.seed(0)
    savers.save(1)
    begin = time.perf_counter()
    savers.save(2)
    seconds = time.perf_counter() - begin
    lost, leftovers, done = [], 0, 2
    for _ in range(_KILLS):
        before = set(savers.temporary())
        read, write = os.pipe()

        def save_on(first: int = done + 1, write: int = write) -> None:
            for step in range(first, first + 1000):
                savers.save(step)
                os.write(write, step.to_bytes(4, "big"))
                prune(savers.run, 2)

        child = fork(save_on)
        os.close(write)
        time.sleep(random.uniform(0.0, 3 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while step := os.read(read, 4):
            done = int.from_bytes(step, "big")
        os.close(read)
        found = savers.found()
        leftovers += bool(set(savers.temporary()) - before)
        if found < done:
            lost.append((done, found))
        done = found
    savers.save(done + 1)
    return {"lost": lost, "leftovers": leftovers, "left": savers.temporary(), "saved": done}


def kill_at_every_event(savers: Savers) -> dict[str, Any]:
    """A saver that replaces a damaged checkpoint and prunes, killed at each step of it."""
    savers.save(1)
    savers.save(2)
    outcomes: list[int] = []
    for event in range(1, 300):
        bad = savers.run / "checkpoints" / "step-00000003"
        bad.mkdir(exist_ok=True)
        for path in bad.rglob("*.*"):
            path.write_bytes(b"")

        def save_and_prune(event: int = event) -> None:
            at_event(event, savers.run, kill_self)
            savers.save(3)
            prune(savers.run, 1)

        _, status = os.waitpid(fork(save_and_prune), 0)
        outcomes.append(savers.found())
        for path in bad.parent.glob("step-*"):
            if path != bad or outcomes[-1] == 3:
                open_checkpoint(path)  # what is being removed has its name no more
        if os.WIFEXITED(status):
            return {"outcomes": outcomes, "left": savers.temporary(), "status": os.WEXITSTATUS(status)}
        savers.save(2)
    raise AssertionError("the saver came to no end")


def save_beside_a_stopped_writer(savers: Savers) -> dict[str, Any]:
    """A writer that sleeps amid its work while another saves."""
    savers.save(1)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def save_slowly() -> None:
        hooked = savers.run / "checkpoints" / ".step-00000002.writing-"
        at_event(2, hooked, stop)
        savers.save(2)

    child = fork(save_slowly)
    os.waitpid(child, os.WUNTRACED)
    beside = savers.temporary()
    for name in beside:
        os.utime(savers.run / "checkpoints" / name, (0, 0))  # so that only its lock tells that its writer lives
    savers.save(3)
    after = savers.temporary()
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    steps = sorted(path.name for path in (savers.run / "checkpoints").glob("step-*"))
    savers.save(4)
    return {
        "beside": beside,
        "after": after,
        "status": os.waitstatus_to_exitcode(status),
        "steps": steps,
        "left": savers.temporary(),
    }


def main(folder: Path, config_file: Path, models: int) -> None:
    torch.set_num_threads(1)
    config = load(config_file)
    training = PackedTraining(config, models=models) if models else Training(config)
    every = (kill_at_random_times, kill_at_every_event, save_beside_a_stopped_writer)
    scenarios = (kill_at_every_event,) if models else every
    print(
        json.dumps(
            {scenario.__name__: scenario(Savers(folder / scenario.__name__, training)) for scenario in scenarios}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
