"""Models in processes of their own against the same models one by one in this one, and how the processes end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linux_processes import alive, ends
from runs import metrics_of, read_json

from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.memory import peak_memory
from tinyllm_ray.model.packed import initialize_packed
from tinyllm_ray.train.checkpoint import open_checkpoint
from tinyllm_ray.train.checkpoints import find_checkpoint, save_checkpoint
from tinyllm_ray.train.packed_processes import ModelProcessError, Processes, _describe_end
from tinyllm_ray.train.packed_shared import share, views_of
from tinyllm_ray.train.trainer import Trainer

MakeConfig = Callable[..., Config]

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches processes as Linux has it"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these compare what the CPU computes"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

ONE_BY_ONE, PROCESSES = {"packed_backward": "one_by_one"}, {"packed_backward": "processes"}
MIXED = {"models": 2, "topology": "complete", "consensus_start_fraction": 0.25, "consensus_power": 1}
APART = {"models": 2, "variants": [{"seed": 0, "peak_learning_rate": 0.02}, {"betas": [0.5, 0.8]}]}


def pack(tiny: MakeConfig, packing: dict[str, Any], **execution: Any) -> Config:
    """Two models of 4 rows an update, in micro-batches of 2."""
    rows = 8 if "topology" in packing else 4
    return tiny(
        optimizer={"gradient_clip": 0.5},
        training={"tokens_per_update": 16 * rows, "token_budget": 16 * rows * 12, "epochs": 3},
        packing=packing,
        execution={"micro_batch_size": 2, **execution},
    )


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def children_of(trainer: Trainer) -> list[int]:
    (processes,) = [own for own in vars(trainer._trainee).values() if isinstance(own, Processes)]
    return [process.pid for process in processes._processes if process.pid is not None]


def assert_equal_steps(one: Trainer, other: Trainer, updates: int) -> None:
    for _ in range(updates):
        assert torch.equal(torch.stack(one.step()), torch.stack(other.step()))
        assert all(map(torch.equal, weights_of(one), weights_of(other)))


@pytest.mark.parametrize("scheme", ["atc", pytest.param("awc", marks=pytest.mark.slow)])
def test_mixed_models_equal_those_one_by_one_until_a_process_is_killed(
    tiny: MakeConfig, tiny_cache: TokenCache, scheme: str
) -> None:
    config = pack(tiny, {**MIXED, "scheme": scheme})
    with (
        Trainer(config.with_execution(PROCESSES), tiny_cache) as trainer,
        Trainer(config.with_execution(ONE_BY_ONE), tiny_cache) as expected,
    ):
        children = children_of(trainer)
        assert [os.getpgid(child) for child in children] == [os.getpgrp()] * 2, "who ends the group ends them too"
        assert_equal_steps(trainer, expected, 4)
        assert trainer.consensus_distance() == expected.consensus_distance()
        own = peak_memory(trainer.device).used_bytes
        assert own is not None
        both = (trainer.peak_memory().used_bytes or 0) - own
        assert 2 * 100 * 2**20 < both < 1.5 * 2**30, "children count too, each what it holds itself"
        before = weights_of(trainer)
        os.kill(children[1], signal.SIGKILL)
        with pytest.raises(ModelProcessError, match="model 1: its process was ended by SIGKILL"):
            trainer.step()
        assert ends(children[0])
        with pytest.raises(ModelProcessError, match="model 1: its process was ended by SIGKILL"):
            trainer.step()
        assert all(map(torch.equal, before, weights_of(trainer))), "what was trained is still there to be saved"


def test_models_apart_go_on_from_a_checkpoint_until_one_raises(
    tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = pack(tiny, APART)
    with (
        Trainer(config.with_execution(ONE_BY_ONE), tiny_cache) as expected,
        Trainer(config.with_execution(PROCESSES), tiny_cache, updates=2) as trainer,
    ):
        for _ in range(2):
            expected.step()
        folder = save_checkpoint(tmp_path, 2, expected.model, expected.optimizer, {}, config, tiny_cache.identity)
        checkpoint = open_checkpoint(folder)
        checkpoint.load_weights(trainer.model)
        checkpoint.load_training(trainer.model, trainer.optimizer)
        assert_equal_steps(trainer, expected, 3)
        children = children_of(trainer)
        for child in children:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                os.kill(child, number)  # as a terminal or Slurm does: the training's own process decides
        assert_equal_steps(trainer, expected, 1)
        batch = trainer.feed.next().to(torch.int64)
        batch[1::2] = 61  # no id of the vocabulary, in the rows of model 1
        with pytest.raises(ModelProcessError, match=r"model 1: its process raised IndexError: index out of range"):
            trainer._trainee.step(batch, 6)
        assert all(map(ends, children))
    assert "in _serve" in capfd.readouterr().err, "the whole traceback is where errors go"


PARENT = """
import sys
from tinyllm_ray.config import load
from tinyllm_ray.train.trainer import Trainer
if __name__ == "__main__":
    trainer = Trainer(load(sys.argv[1]), None)
    print(*[process.pid for process in trainer._trainee._processes._processes], flush=True)
    while True:
        trainer.step()
        print("stepped", flush=True)
"""


@pytest.fixture
def parent(tiny: MakeConfig, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that trains a pack without end, and says its children's ids and every update."""
    recipe, program = tmp_path / "pack.yaml", tmp_path / "parent.py"
    recipe.write_text(pack(tiny, APART, **PROCESSES).to_yaml())
    program.write_text(PARENT)
    process = subprocess.Popen([sys.executable, str(program), str(recipe)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("started", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_none_outlives_a_parent_that_is_killed(parent: subprocess.Popen[str], started: bool) -> None:
    """In an update, and while they still import."""
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    if started:
        assert parent.stdout.readline() == "stepped\n"
        assert all(map(alive, children))
    parent.kill()
    assert all(map(ends, children))


@pytest.mark.slow
def test_a_parent_that_ends_without_closing_waits_for_none(tiny: MakeConfig, tmp_path: Path) -> None:
    recipe, program = tmp_path / "pack.yaml", tmp_path / "parent.py"
    recipe.write_text(pack(tiny, APART, **PROCESSES).to_yaml())
    program.write_text(PARENT.replace("    while True:\n", "    for _ in range(2):\n"))
    done = subprocess.run([sys.executable, str(program), str(recipe)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.count("stepped")) == (0, 2), done.stderr
    assert not any(alive(int(pid)) for pid in done.stdout.split("\n")[0].split())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_a_run_in_order(
    tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal sends SIGINT and Slurm SIGTERM; the run resumes in one process, as the unbroken one."""
    values = pack(tiny, {**MIXED, "scheme": "awc"}, **PROCESSES).model_dump(mode="json")
    values["data"]["cache"] = str(tiny_cache.folder)
    values["training"]["token_budget"] = 128 * 10**6
    recipe, out = tmp_path / "pack.yaml", tmp_path / "run"
    recipe.write_text(Config.model_validate(values).to_yaml())
    command = [sys.executable, "-m", "tinyllm_ray.train", "--config", str(recipe), "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (out / "metrics.jsonl").exists() or len(metrics_of(out)) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, "Traceback" in errors) == (128 + number, False), errors
    result = read_json(out / "result.json")
    assert (result["status"], result["signal"]) == ("interrupted", number)
    assert result["step"] == find_checkpoint(out).step == metrics_of(out)[-1]["step"]


@pytest.mark.slow
def test_compiled_models_equal_those_one_by_one(
    tiny: MakeConfig, tiny_cache: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = pack(tiny, APART, update="compiled")
    with (
        Trainer(config.with_execution(PROCESSES), tiny_cache) as trainer,
        Trainer(config.with_execution(ONE_BY_ONE), tiny_cache) as expected,
    ):
        assert_equal_steps(trainer, expected, 3)


@pytest.mark.slow
def test_children_start_where_another_thread_trains(tiny: MakeConfig) -> None:
    """They end with the process, not with the thread that started them."""
    started: list[Trainer] = []
    thread = threading.Thread(target=lambda: started.append(Trainer(pack(tiny, APART, **PROCESSES), None)))
    thread.start()
    thread.join()
    with started[0] as trainer:
        assert trainer.step().loss.isfinite().all()


def test_a_graph_of_an_update_is_refused(tiny: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"update graph captures an update within one process.*take packed_backward"):
        pack(tiny, APART, update="graph", **PROCESSES)
    assert tiny(execution={"update": "graph", **PROCESSES}).packed_backward == "processes", "one model has none"


def test_a_process_that_ends_by_itself_is_told_from_one_that_is_ended() -> None:
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    process.start()
    assert _describe_end(process) == "its process ended with exit status 3; standard error says why"


@pytest.mark.parametrize(("threads", "each"), [(1, 1), (5, 2), (6, 3)])
def test_what_is_shared_holds_the_models_as_they_were(tiny: MakeConfig, threads: int, each: int) -> None:
    config = pack(tiny, APART)
    model = initialize_packed(config.model, [1, 2]).double()
    before = [weight.detach().clone() for weight in model.parameters()]
    torch.set_num_threads(threads)
    shared = share(model, config)
    assert shared.threads == each, "of two models"
    assert all(map(torch.equal, before, model.parameters()))
    assert all(tensor.is_shared() for tensor in (shared.weights, shared.gradients, shared.rows, shared.losses))
    assert {weight.untyped_storage().data_ptr() for weight in model.parameters()} == {shared.weights.data_ptr()}
    assert (shared.rows.shape, shared.rows.dtype) == ((2, 4, 17), torch.int64)
    assert (shared.gradients.dtype, shared.losses.dtype) == (torch.float64, torch.float64)


def test_weights_have_places_of_their_own_in_a_buffer() -> None:
    shapes = [torch.Size((2, 3)), torch.Size((2, 64, 1)), torch.Size((2, 65))]
    flat = torch.zeros(128 + 128 + 256)
    for number, view in enumerate(views_of(flat, shapes), 1):
        assert view.data_ptr() % 512 == flat.data_ptr() % 512
        view += number
    assert [view.unique().tolist() for view in views_of(flat, shapes)] == [[1.0], [2.0], [3.0]]
