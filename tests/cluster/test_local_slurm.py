"""Jobs on a real Slurm of two nodes: they come up, do their work, and leave nothing behind however they end."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import TINY_RECIPE, TINY_SPACE
from local_slurm import ROOT, LocalSlurm, booted
from slurm_studies import MANY, MANY_STUDY

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
NODES = ("n1", "n2")

LOOK_AROUND = """
import json, os, socket, stat, time, urllib.error, urllib.request
import ray
from pathlib import Path

ray.init(log_to_driver=False, logging_level="ERROR")
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
record = json.loads(Path(f"tinyllm-{os.environ['SLURM_JOB_ID']}/cluster.json").read_text())

def status(headers):
    url = f"http://127.0.0.1:{record['dashboard_port']}/api/cluster_status"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers)).status
    except urllib.error.HTTPError as error:
        return error.code

def refused(host):
    try:
        socket.create_connection((host, record["dashboard_port"]), timeout=5).close()
    except OSError:
        return True
    return False

print("SAW " + json.dumps({
    "nodes": {n["NodeManagerAddress"]: [n["Resources"][k] for k in ("CPU", "GPU", "memory")] for n in ray.nodes()},
    "modes": [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)],
    "variables": [name for name in os.environ if os.environ[name] == token.read_text()],
    "dashboard": [status({}), status({"Authorization": "Bearer " + token.read_text()}), refused("10.83.0.11")],
    "end": int(os.environ["SLURM_JOB_END_TIME"]) - time.time(),
    "niceness": ray.get(ray.remote(lambda: os.getpriority(os.PRIO_PROCESS, 0)).remote()),
}))
"""

STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
print("the command runs", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def shared_slurm(built_root: Path) -> Iterator[LocalSlurm]:
    with booted(nodes=2, cpus=4, gpus=2, cache=built_root) as local:
        prepare(local.work)
        yield local


@pytest.fixture
def slurm(shared_slurm: LocalSlurm) -> LocalSlurm:
    return shared_slurm.for_one_test()


@pytest.fixture
def failing_slurm(built_root: Path) -> Iterator[LocalSlurm]:
    """One of its own for a test that breaks it; it boots in a second."""
    with booted(nodes=2, cpus=4, gpus=2, cache=built_root) as local:
        prepare(local.work)
        yield local


def prepare(folder: Path) -> None:
    files = {
        "look_around.py": LOOK_AROUND,
        "stubborn.py": STUBBORN,
        "count.py": "import ray; ray.init(logging_level='ERROR'); print('NODES', len(ray.nodes()))",
        "wait.yaml": "setup: [touch here, 'until [ -e go ]; do sleep 0.2; done']",
        "recipe.yaml": TINY_RECIPE,
        "space.yaml": TINY_SPACE,
        "many.yaml": MANY,
    }
    for name, text in files.items():
        (folder / name).write_text(text)


def assert_nothing_is_left(slurm: LocalSlurm, job: int) -> None:
    slurm.wait(lambda: not any(slurm.processes(node) for node in NODES))
    for node in NODES:
        assert f"tr0-{job}" not in slurm.files(node)


def test_both_nodes_have_what_slurm_gave_and_strangers_stay_outside(slurm: LocalSlurm) -> None:
    size = ("--nodes", 2, "--cpus-per-node", 2, "--gpus-per-node", 1, "--memory-per-node", "2G", "--time", 5)
    stale = "/tmp/ray/ray_current_cluster"  # a dead cluster's, in a folder that somebody else made
    slurm.on("n1", "sh", "-c", f"mkdir -m 755 /tmp/ray && echo 10.0.0.9:6379 >{stale}")
    job = slurm.submit(*size, "--", "look_around.py")
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    assert slurm.on("n1", "cat", stale) == "10.0.0.9:6379\n"
    (line,) = [line for line in slurm.said(job).splitlines() if line.startswith("SAW ")]
    saw = json.loads(line.removeprefix("SAW "))
    given = [2, 1, (2048 - 128) * 2**20]  # of 4 processors, 2 GPUs and 6,000 MB
    assert saw["nodes"] == {"10.83.0.11": given, "10.83.0.12": given}
    assert saw["modes"] == [0o600, 0o700]
    assert saw["variables"] == []
    assert saw["dashboard"] == [401, 200, True]
    assert 0 < saw["end"] < 300
    assert saw["niceness"] == os.getpriority(os.PRIO_PROCESS, 0), "a candidate runs as a training does"
    assert_nothing_is_left(slurm, job)


@pytest.mark.slow
def test_a_study_runs_on_two_nodes_by_submit(slurm: LocalSlurm) -> None:
    study = ("tune", "--budget", "5m", "--config", "recipe.yaml", "--space", "space.yaml", "--out", "study")
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 10, "--", *study)
    assert slurm.ended(job) == "COMPLETED", slurm.said(job)
    assert "2 node(s), 2 cores a node" in slurm.said(job)
    records = [json.loads(line) for line in (slurm.work / "study" / "trials.jsonl").read_text().splitlines()]
    assert records
    assert {record["fate"] for record in records} == {"complete"}
    assert_nothing_is_left(slurm, job)
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "account", job)
    assert f"job {job}: " in told
    assert "COMPLETED after" in told
    assert "(from sacct -c)" in told
    assert "before the first trial" in told


@pytest.mark.slow
def test_the_warning_has_a_study_save_what_it_has_and_end(slurm: LocalSlurm) -> None:
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 90, "--", *MANY_STUDY, "--out", "warned")
    slurm.wait_for_line(job, "t1: complete")
    slurm.login("scancel", "--batch", "--signal=USR1", job)
    assert slurm.ended(job) == "FAILED"
    assert slurm.field(job, "ExitCode") == "143:0"
    summary = json.loads((slurm.work / "warned" / "summary.json").read_text())
    states = [row["state"] for row in summary["candidates"]]
    assert states[0] == "complete"
    assert "running" not in states
    assert_nothing_is_left(slurm, job)


def test_two_jobs_on_one_node_leave_each_other_alone(slurm: LocalSlurm) -> None:
    size = ("--cpus-per-node", 2, "--time", 5, "--sbatch=--nodelist=n1")
    staying = slurm.submit(*size, "--", "stubborn.py")
    going = slurm.submit(*size, "--", "count.py")
    assert slurm.ended(going) == "COMPLETED", slurm.said(going)
    assert "NODES 1\n" in slurm.said(going)
    slurm.wait_for_line(staying, "the command runs")
    told = slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "status", staying)
    assert f"job {staying}: RUNNING on n1 " in told
    assert "cluster: 1 nodes, n1; head n1\n" in told
    assert "ssh -N -L" in slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "dashboard", staying)
    slurm.wait(lambda: not slurm.processes_of(going, "n1"), staying)
    assert any("raylet/raylet --" in line for line in slurm.processes_of(staying, "n1")), slurm.processes("n1")
    ports = [
        set(json.loads((slurm.work / f"tinyllm-{job}" / "cluster.json").read_text())["ports"])
        for job in (staying, going)
    ]
    assert not ports[0] & ports[1]
    slurm.login("scancel", staying)
    assert slurm.ended(staying) == "CANCELLED"
    slurm.wait(lambda: slurm.is_empty(*NODES))


def test_a_plain_sbatch_of_the_shipped_script_passes_the_commands_status_on(slurm: LocalSlurm) -> None:
    (slurm.work / "seven.py").write_text("raise SystemExit(7)")
    script = ROOT / "cluster" / "ray_cluster.sbatch"
    python = f"TINYLLM_RAY_PYTHON={sys.executable}"
    job = int(slurm.login("env", python, "sbatch", "--parsable", "--time=5", script, "seven.py"))
    assert slurm.ended(job) == "FAILED"
    assert slurm.field(job, "ExitCode") == "7:0"
    assert_nothing_is_left(slurm, job)
    for action, number, said in (
        ("dashboard", job, f"error: job {job} has ended (FAILED), and its dashboard with it\n"),
        ("cancel", job, f"error: job {job} has ended already: FAILED\n"),
        ("cancel", 999, "error: Slurm knows no job 999; python -m tinyllm_ray.cluster status lists yours\n"),
    ):
        done = slurm.try_login(sys.executable, "-m", "tinyllm_ray.cluster", action, number)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.slow
def test_scancel_leaves_no_process(slurm: LocalSlurm) -> None:
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 5, "--", "stubborn.py")
    slurm.wait_for_line(job, "the command runs")
    assert all(any("raylet" in line for line in slurm.processes(node)) for node in NODES)
    slurm.login(sys.executable, "-m", "tinyllm_ray.cluster", "cancel", job)
    assert slurm.ended(job) == "CANCELLED"
    slurm.wait(lambda: not any(slurm.processes(node) for node in NODES))


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(slurm: LocalSlurm) -> None:
    job = slurm.submit("--nodes", 2, "--cpus-per-node", 2, "--time", 5, "--", "stubborn.py")
    slurm.wait_for_line(job, "the command runs")
    slurm.login("scancel", "--batch", "--signal=KILL", job)
    assert slurm.ended(job) == "FAILED"
    slurm.wait(lambda: not any(slurm.processes(node) for node in NODES))


@pytest.mark.slow
def test_the_time_limit_leaves_no_process(slurm: LocalSlurm) -> None:
    # The warning is turned off, so that the limit itself ends the job.
    options = ("--nodes", 2, "--cpus-per-node", 2, "--time", 1, "--sbatch=--signal=B:CONT@1")
    job = slurm.submit(*options, "--", "stubborn.py")
    assert slurm.ended(job) == "TIMEOUT"
    slurm.wait(lambda: not any(slurm.processes(node) for node in NODES))


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 2])
def test_a_missing_node_is_named(failing_slurm: LocalSlurm, least: int) -> None:
    slurm = failing_slurm
    size = ("--nodes", 2, "--cpus-per-node", 2, "--time", 5, "--min-nodes", least)
    job = slurm.submit(*size, "--site", "wait.yaml", "--", "count.py")
    slurm.wait((slurm.work / "here").exists)
    slurm.kill("n2")
    (slurm.work / "go").touch()
    state, log = slurm.ended(job), slurm.said(job)
    missing = "n2 (its step ended with 233: Task launch for"
    if least == 1:
        assert state == "COMPLETED", log
        assert "cluster: 1 of 2 nodes ready" in log
        assert f"going on without {missing}" in log
        assert "NODES 1" in log
    else:
        assert slurm.field(job, "ExitCode") == "3:0"
        assert f"error: 1 of 2 nodes are there; missing: {missing}" in log


def test_what_slurm_refuses_is_passed_on_in_one_line(slurm: LocalSlurm) -> None:
    done = slurm.try_login(
        sys.executable,
        "-m",
        "tinyllm_ray.cluster",
        "submit",
        "--partition",
        "nonsense",
        "--",
        "tune",
        "--budget",
        "45m",
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: sbatch: invalid partition specified: nonsense")
    assert done.stderr.count("\n") == 1
