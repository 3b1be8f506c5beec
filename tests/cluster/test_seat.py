"""A trial's seat: cores near its GPU that nobody else has, memory beside the CPU, neighbours seen."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded_machines import gh200, gh200_four, laptop, two_sockets, write_machine

from tinyllm_ray.cluster.numa import Seat, trial_gpu
from tinyllm_ray.cluster.numa_claims import Claims
from tinyllm_ray.cluster.numa_memory import MemoryPolicy, bind_host_memory
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.measure.numa import gpu_addresses


class Kernel(MemoryPolicy):
    """Remembers what it is asked for instead of doing it."""

    def __init__(self, bound: bool = False, refusal: str | None = None) -> None:
        self.nodes: list[int] | None = None
        self._bound, self._refusal = bound, refusal

    def bound(self) -> bool:
        return self._bound

    def bind(self, nodes: Iterable[int]) -> str | None:
        self.nodes = list(nodes)
        return self._refusal


def seat(root: Path, claims: Path, gpu: str, cores: int, allowed: Iterable[int]) -> tuple[Seat, list[set[int]]]:
    moved: list[set[int]] = []
    made = Seat(cores, gpu, root, Claims(claims), lambda: allowed, moved.append, Kernel())
    return made, moved


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tinyllm_ray.cluster.numa_claims import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.take_cores(map(int, sys.argv[2].split(",")), int(sys.argv[3])), claims.take_gpu(sys.argv[4]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_trial(tmp_path: Path) -> Iterable["subprocess.Popen[str]"]:
    """Another process that holds cores 0 to 3 and the GPU at 0000:18:00.0."""
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "claims"), "0,1,2,3,4", "4", "0000:18:00.0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0, 1, 2, 3] True\n"
        yield process
        process.kill()


def test_a_trial_moves_to_its_gpus_socket(tmp_path: Path) -> None:
    made, moved = seat(two_sockets(tmp_path), tmp_path / "claims", "0000:9a:00.0", 8, range(32))
    assert moved == [set(range(16, 24))]
    assert (made.placement.cores, made.placement.far_cores, made.placement.memory) == ("16-23", "", None)


def test_a_trial_takes_no_core_of_another(tmp_path: Path, other_trial: "subprocess.Popen[str]") -> None:
    made, moved = seat(two_sockets(tmp_path / "m"), tmp_path / "claims", "0000:2a:00.0", 8, range(32))
    assert moved == [set(range(4, 12))]
    assert made.neighbours() == ["0000:18:00.0"]


def test_neighbours_are_those_at_the_candidates_beginning_or_end(
    tmp_path: Path, other_trial: "subprocess.Popen[str]"
) -> None:
    made, _ = seat(two_sockets(tmp_path / "m"), tmp_path / "claims", "0000:2a:00.0", 8, range(32))
    made.look_around()
    other_trial.kill()
    other_trial.wait()
    assert made.as_json()["neighbours"] == ["0000:18:00.0"]
    made.look_around()
    assert made.as_json()["neighbours"] == []
    assert made.as_json()["cores"] == "4-11"


def test_a_claim_ends_with_its_process(tmp_path: Path, other_trial: "subprocess.Popen[str]") -> None:
    other_trial.kill()
    other_trial.wait()
    _, moved = seat(two_sockets(tmp_path / "m"), tmp_path / "claims", "0000:18:00.0", 8, range(32))
    assert moved == [set(range(8))]


def test_only_cores_of_the_job_are_taken_and_far_ones_where_near_ones_are_too_few(tmp_path: Path) -> None:
    made, moved = seat(two_sockets(tmp_path), tmp_path / "claims", "0000:9a:00.0", 6, [*range(8), *range(28, 32)])
    assert moved == [{28, 29, 30, 31, 0, 1}]
    assert made.placement.far_cores == "0-1"


def test_cores_are_shared_where_all_are_taken(tmp_path: Path, other_trial: "subprocess.Popen[str]") -> None:
    _, moved = seat(two_sockets(tmp_path / "m"), tmp_path / "claims", "0000:18:00.0", 3, [0, 1, 2, 16])
    assert moved == [{16, 0, 1}]


@pytest.mark.parametrize("cores", [8, 72])
def test_each_superchip_keeps_its_own_trial(tmp_path: Path, cores: int) -> None:
    root = gh200_four(tmp_path)
    for number, address in enumerate(gpu_addresses(root)):
        kernel, moved = Kernel(), list[set[int]]()
        Seat(cores, address, root, Claims(tmp_path / f"claims{number}"), lambda: range(288), moved.append, kernel)
        assert moved == [set(range(72 * number, 72 * number + cores))]
        assert kernel.nodes == [0, 1, 2, 3]


def test_nothing_moves_where_there_is_one_node_or_the_trial_has_every_core(tmp_path: Path) -> None:
    for number, (root, gpu, cores) in enumerate(
        [
            (laptop(tmp_path / "laptop"), "0000:01:00.0", 2),
            (two_sockets(tmp_path / "two"), "0000:18:00.0", 32),
            (tmp_path / "nothing", "0000:18:00.0", 2),
        ]
    ):
        made, moved = seat(root, tmp_path / f"claims{number}", gpu, cores, range(8 if cores == 2 else 32))
        assert moved == []
        assert made.placement.cores is None


def test_a_trial_without_a_gpu_is_left_as_it_is(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    made = Seat(1, None, gh200_four(tmp_path))
    assert os.sched_getaffinity(0) == before
    assert made.neighbours() == []


def test_a_refused_move_costs_the_placement_only(tmp_path: Path) -> None:
    def refuse(cores: set[int]) -> None:
        raise OSError("no")

    claims = Claims(tmp_path / "claims")
    made = Seat(8, "0000:18:00.0", two_sockets(tmp_path / "m"), claims, lambda: range(32), refuse, Kernel())
    assert made.placement.cores is None


def test_host_memory_of_a_coherent_machine_lies_beside_the_cpu(tmp_path: Path) -> None:
    kernel = Kernel()
    assert bind_host_memory(gh200(tmp_path), kernel) == "nodes 0"
    assert kernel.nodes == [0]


def test_memory_is_bound_within_what_the_job_may_use(tmp_path: Path) -> None:
    root = gh200_four(tmp_path)
    (root / "proc/self/status").write_text("Mems_allowed_list:\t1,12\n")
    kernel = Kernel()
    assert bind_host_memory(root, kernel) == "nodes 1"
    (root / "proc/self/status").write_text("Mems_allowed_list:\t12\n")
    assert bind_host_memory(root, Kernel()) == "not bound: no node of the host's memory is allowed"


def test_a_policy_of_the_users_stays_and_a_refusal_is_told(tmp_path: Path) -> None:
    root, kernel = gh200(tmp_path), Kernel(bound=True)
    assert bind_host_memory(root, kernel) == "left as set before"
    assert kernel.nodes is None
    assert bind_host_memory(root, Kernel(refusal="Operation not permitted")) == "not bound: Operation not permitted"


def test_nothing_is_bound_where_all_memory_has_processors(tmp_path: Path) -> None:
    kernel = Kernel()
    assert bind_host_memory(two_sockets(tmp_path), kernel) is None
    assert kernel.nodes is None


BIND = """
from tinyllm_ray.cluster.numa_memory import MemoryPolicy
import subprocess, sys
policy = MemoryPolicy()
print(policy.bound(), policy.bind([0]), flush=True)
ask = "from tinyllm_ray.cluster.numa_memory import MemoryPolicy; print(MemoryPolicy().bound())"
subprocess.run([sys.executable, "-c", ask], check=True)
"""


def test_the_real_kernel_binds_and_children_inherit_it() -> None:
    if MemoryPolicy().bound() is not False:
        pytest.skip("this kernel or container has no memory policies, or has set one")
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True)
    if "not permitted" in done.stdout:
        pytest.skip("this container may not set a memory policy")
    assert done.stdout == "False None\nTrue\n"


def test_a_file_of_claims_that_is_anothers_or_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        Claims(tmp_path / "link")
    Claims(tmp_path / "claims").close()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Claims(tmp_path / "claims")


class _Nvml:
    NVMLError = RuntimeError

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 1:
            raise RuntimeError("no such device")
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000019:01:00.0" if handle == "index 1" else "00000009:01:00.0")


@pytest.mark.parametrize(
    ("visible", "address"),
    [("1", "0019:01:00.0"), ("GPU-8f6b", "0009:01:00.0"), ("0,1", "0009:01:00.0"), ("7", None), ("", None)],
)
def test_a_trials_gpu_is_the_first_that_is_visible(visible: str, address: str | None) -> None:
    assert trial_gpu({"CUDA_VISIBLE_DEVICES": visible}, _Nvml()) == address


def test_memory_without_processors_that_holds_nothing_changes_nothing(tmp_path: Path) -> None:
    kernel = Kernel()
    assert bind_host_memory(write_machine(tmp_path, {0: ("0-3", 16), 1: ("", 0)}, {}), kernel) is None
