"""A node's step: its private folder, its secret, what Ray is told, and whether Ray is there."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinyllm_ray.cluster import node, node_folder
from tinyllm_ray.cluster.addresses import require_answer
from tinyllm_ray.cluster.node import Node, ray_arguments, ray_environment, share_of_host
from tinyllm_ray.cluster.node_folder import NodeFolder, claim, clear_left_behind, job_folder
from tinyllm_ray.errors import ConfigError, TinyllmRayError

HEAD = Node(job=17, name="gh1", head=None, cpus=72, gpus=1, memory_mib=100_000)


def test_ray_is_told_what_slurm_gave_and_listens_where_no_other_job_does() -> None:
    arguments = ray_arguments(HEAD, "10.0.0.1", (10_068, 10_069, 10_070, 10_071), Path("/tmp/tr0-17"))
    assert {"--head", "--num-cpus=72", "--num-gpus=1", "--port=10068", "--ray-client-server-port=10070"} <= {*arguments}
    assert {"--dashboard-host=127.0.0.1", "--dashboard-port=10069", "--node-ip-address=10.0.0.1"} <= {*arguments}
    sizes = dict(word.split("=") for word in arguments if "memory" in word)
    assert sum(map(int, sizes.values())) == 100_000 * 2**20
    fixed = [word for word in arguments if "port" in word.split("=")[0] and not word.endswith(("=0", "68", "69", "70"))]
    assert fixed == []


def test_a_worker_joins_the_head_and_leaves_the_dashboard_and_the_folder_to_it() -> None:
    worker = Node(job=17, name="gh2", head="10.0.0.1:10068", cpus=1, gpus=0, memory_mib=0)
    arguments = ray_arguments(worker, "10.0.0.2", (), Path("/tmp/tr0-17"))
    assert "--address=10.0.0.1:10068" in arguments
    assert not [word for word in arguments if word.startswith(("--head", "--dashboard-port", "--temp-dir", "--port="))]


def test_where_slurm_hands_out_no_memory_it_is_the_processors_share() -> None:
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    cores = os.cpu_count() or 1
    assert share_of_host(cores) == host
    assert share_of_host(10 * cores) == host
    assert cores == 1 or share_of_host(1) <= host // cores


def test_rays_sockets_stay_below_the_systems_limit() -> None:
    folder = job_folder("/tmp", 2_000_123, 99_999_999)
    session = "session_2026-11-29_22-39-01_822038_1234567/sockets/plasma_store"
    assert len(str(folder / "r" / session)) < 107


def test_nothing_of_another_cluster_reaches_ray_and_the_secret_is_in_a_file_only() -> None:
    before = {"RAY_ADDRESS": "other:1", "RAY_AUTH_TOKEN": "other", "RAY_AUTH_MODE": "disabled", "HOME": "/root"}
    after = ray_environment(before, Path("/tmp/tr0-17/token"))
    assert after["HOME"] == "/root"
    assert after["RAY_AUTH_MODE"] == "token"
    assert after["RAY_AUTH_TOKEN_PATH"] == "/tmp/tr0-17/token"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(after)


def test_a_folder_is_private_and_held_by_one(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        lock = claim(tmp_path / "tr0-1")
    finally:
        os.umask(before)
    assert (tmp_path / "tr0-1").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="in use by another cluster"):
        claim(tmp_path / "tr0-1")
    os.close(lock)
    os.close(claim(tmp_path / "tr0-1"))


def test_a_folder_that_someone_else_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="not a private folder of yours"):
            claim(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be made"):
        claim(tmp_path / "nowhere" / "tr0-1")


def test_folders_of_killed_jobs_go_and_those_in_use_or_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tr0-1", "tr0-2", "tr0-3", "tr10-4", "else"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "tr0-1" / "session").mkdir()
    lock = claim(tmp_path / "tr0-2")
    clear_left_behind(tmp_path / "tr0-3")
    assert len(list(tmp_path.iterdir())) == 5  # all of this minute
    now = time.time() + node_folder._SETTLED_SECONDS + 1
    monkeypatch.setattr(node_folder.time, "time", lambda: now)
    clear_left_behind(tmp_path / "tr0-9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["else", "tr0-2", "tr10-4"]
    os.close(lock)


def test_a_node_that_does_not_reach_its_head_says_so_before_ray_tries_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "require_answer", functools.partial(require_answer, seconds=0.0))
    monkeypatch.setattr(node, "_run_ray", lambda *_: pytest.fail("Ray is started"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{silent.getsockname()[1]}"
        worker = Node(job=17, name="gh2", head=head, cpus=1, gpus=0, memory_mib=512, scratch=str(tmp_path))
        with (
            NodeFolder(worker.scratch, worker.job, False) as folder,
            pytest.raises(TinyllmRayError, match=rf"^the head at {head} does not answer 127\.0\.0\.1 \(lo\)"),
        ):
            node._start(worker, folder, tmp_path / "token")


RAY_WHOSE_RAYLET_ENDS = """
import subprocess
from pathlib import Path

def main():
    here = Path(__file__).parents[2]
    with (here / "starts").open("a") as starts:
        starts.write("x")
    stays = len((here / "starts").read_text()) > {ending}
    for name, seconds in (("gcs_server", 600), ("raylet", 600 if stays else 0)):
        process = subprocess.Popen([here / name, "-S", "-c", f"import time; time.sleep({{seconds}})"])
        if not seconds:
            process.wait()
"""


@pytest.mark.parametrize(("ending", "starts"), [(1, 2), (9, 3)])
def test_a_raylet_that_ends_at_once_is_started_again_and_in_the_end_said(
    tmp_path: Path, ending: int, starts: int
) -> None:
    scripts = tmp_path / "ray" / "scripts"
    scripts.mkdir(parents=True)
    for package in (scripts.parent, scripts):
        (package / "__init__.py").touch()
    (scripts / "scripts.py").write_text(RAY_WHOSE_RAYLET_ENDS.format(ending=ending))
    for name in ("raylet", "gcs_server"):
        (tmp_path / name).symlink_to(os.path.realpath(sys.executable))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    told = Node(
        job=17, name="gh1", head=None, cpus=1, gpus=0, memory_mib=512, known_as="127.0.0.1", scratch=str(scratch)
    )
    step = subprocess.Popen(
        [sys.executable, "-m", "tinyllm_ray.cluster.node", str(told)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert step.stdin
    assert step.stdout
    step.stdin.write("secret\n")
    step.stdin.flush()
    said = json.loads(step.stdout.readline())
    if said["event"] == "ready":  # Slurm's warning goes to every process of a step: --signal=USR1@60
        step.send_signal(signal.SIGUSR1)
    step.communicate()
    assert len((tmp_path / "starts").read_text()) == starts
    assert (said["event"], step.returncode) == (("ready", 0) if ending == 1 else ("failed", 1))
    assert said.get("reason", "").endswith("" if ending == 1 else ": its process for the node ends at once")
    assert not list(scratch.iterdir())
